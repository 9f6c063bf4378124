"""The keys that sign packages, and those that check signatures.

Ed25519 keys make and check this format's own signatures, keys on a NIST curve those of OpenSSF model signing. Checking
is the library's; signing takes the `cryptography` package, which is imported when a private key is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from exportkit.errors import HostError, UsageError
from exportkit.package import core

_MAX_KEY_BYTES = 64 << 10
_MAKE = "openssl genpkey -algorithm ed25519 -out private.pem && openssl pkey -in private.pem -pubout -out public.pem"


@dataclass(frozen=True)
class PublicKey:
    """Names a key that checks signatures.

    Attributes:
        id: Hex sha256 of the 32 bytes of an Ed25519 key; of the PEM text of another, as model signing has it.
        source: Where it came from, for messages.
        is_ed25519: Which of the two kinds it is.
    """

    id: str
    source: str
    is_ed25519: bool


@dataclass(frozen=True)
class PrivateKey:
    """Makes signatures that its `public` half checks."""

    public: PublicKey
    _key: Any = field(repr=False, compare=False)

    def sign(self, message: bytes) -> bytes:
        """The signature: 64 bytes of Ed25519, or ECDSA in DER over the hash that goes with the curve."""
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
    """A public key from a PEM file, or from PEM text.

    Args:
        source: The file's path, or the text itself.

    Raises:
        UsageError: It cannot be read, or is no public key of a kind that signs packages.
        HostError: libcrypto is missing here.
    """
    return _DECODER.decode(core.text("ek_public_key", core.encoded(source)))


def decode_signers(content: bytes) -> tuple[PublicKey, ...]:
    """The keys whose signatures hold, as the library lists them."""
    return _SIGNERS.decode(content)


def read_private_key(path: Path, ask_password: Callable[[], str]) -> PrivateKey:
    """A private key from a PEM file.

    Args:
        path: Of the file.
        ask_password: Called if the key is encrypted.

    Raises:
        UsageError: It cannot be read, the password is wrong, or it is no private key of a kind that signs packages.
        HostError: The `cryptography` package is not installed, or libcrypto is missing.
    """
    name = f"the private key {path}"
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_KEY_BYTES)  # whatever it is, /dev/zero included
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
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # a TypeError of an empty password
        raise UsageError(
            f"{name} cannot be used: {str(error).partition(chr(10))[0].rstrip('.')}",
            hint=f"It must be PEM, its password right. Make one: {_MAKE}",
        ) from error
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        return PrivateKey(replace(read_public_key(public.decode()), source=str(path)), key)
    except UsageError as error:
        raise UsageError(f"{name} cannot be used: {error.message}", hint=error.hint) from error
