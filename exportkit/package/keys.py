"""Keys that sign packages and keys that check signatures.

Ed25519 keys are for exportkit's own signatures, and keys on a NIST curve for OpenSSF model signing. csrc/package checks
signatures. Signing needs the `cryptography` package, which is imported when a private key is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from exportkit.errors import HostError, UsageError
from exportkit.package import core

_MAX_KEY_BYTES = 64 << 10
_MAKE = "openssl genpkey -algorithm ed25519 -out private.pem && openssl pkey -in private.pem -pubout -out public.pem"


@dataclass(frozen=True)
class PublicKey:
    """A key that checks signatures.

    Attributes:
        id: The hex sha256 of an Ed25519 key's 32 bytes, or of another key's PEM text, as in model signing.
        source: The key's origin, for messages.
        is_ed25519: Whether it is an Ed25519 key.
    """

    id: str
    source: str
    is_ed25519: bool


class SigningKey(Protocol):
    """What makes signatures: a private key, or a command that has one."""

    @property
    def public(self) -> PublicKey:
        """The key that checks the signatures."""

    def sign(self, message: bytes) -> bytes:
        """Signs with Ed25519 (64 bytes), or with ECDSA (DER) and the curve's hash."""


@dataclass(frozen=True)
class PrivateKey:
    """A key that makes signatures, which `public` checks."""

    public: PublicKey
    _key: Any = field(repr=False, compare=False)

    def sign(self, message: bytes) -> bytes:
        """Signs with Ed25519 (64 bytes), or with ECDSA (DER) and the curve's hash."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

        if self.public.is_ed25519:
            signature: bytes = self._key.sign(message)
            return signature
        by_size = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
        signature = self._key.sign(message, ECDSA(by_size[self._key.curve.key_size]))
        return signature


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(PublicKey)
_SIGNERS = msgspec.json.Decoder(tuple[PublicKey, ...])


def read_public_key(source: str | os.PathLike[str]) -> PublicKey:
    """Reads a public key.

    Args:
        source: The path of a PEM file, or PEM text.

    Raises:
        UsageError: The key cannot be read, or its kind cannot sign packages.
        HostError: libcrypto is not installed.
    """
    return _DECODER.decode(core.text("ek_public_key", core.encoded(source)))


def decode_signers(content: bytes) -> tuple[PublicKey, ...]:
    """Decodes the library's list of keys with valid signatures."""
    return _SIGNERS.decode(content)


def read_private_key(path: Path, ask_password: Callable[[], str]) -> PrivateKey:
    """Reads a private key from a PEM file.

    Args:
        path: The PEM file.
        ask_password: Returns the password. It is called only if the key is encrypted.

    Raises:
        UsageError: The key cannot be read, the password is wrong, or the key's kind cannot sign packages.
        HostError: The `cryptography` package or libcrypto is not installed.
    """
    name = f"the private key {path}"
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_KEY_BYTES)  # limited, because the file may be endless, such as /dev/zero
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
    except ImportError as error:
        raise HostError(
            "signing needs the package `cryptography`, which is not installed", hint="pip install 'exportkit[sign]'"
        ) from error
    try:
        try:
            key: Any = load_pem_private_key(text, password=None)
        except TypeError:  # it is encrypted
            key = load_pem_private_key(text, password=ask_password().encode())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # an empty password is a TypeError
        if b"-----BEGIN PUBLIC KEY-----" in text:
            raise UsageError(
                f"{name} cannot be used: it is a public key, which checks signatures and cannot make them",
                hint="Give the private key that it belongs to. The public key is for --public-key.",
            ) from error
        raise UsageError(
            f"{name} cannot be used: {str(error).partition(chr(10))[0].rstrip('.')}",
            hint=f"It must be a PEM file, and the password must be right. Make a key with: {_MAKE}",
        ) from error
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        return PrivateKey(replace(read_public_key(public.decode()), source=str(path)), key)
    except UsageError as error:
        raise UsageError(f"{name} cannot be used: {error.message}", hint=error.hint) from error
