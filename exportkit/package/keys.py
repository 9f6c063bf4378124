"""The keys that sign packages, and those that check signatures.

Ed25519 keys make and check this format's own signatures, keys on a NIST curve those of OpenSSF model signing.
The `cryptography` package is imported when the first key is read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exportkit.errors import HostError, UsageError
from exportkit.package.small_files import read_small

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        ECDSA,
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )

_CURVES = ("secp256r1", "secp384r1", "secp521r1")  # P-256, P-384 and P-521: those that model signing allows
_KINDS = "Ed25519, or a key on the curve P-256, P-384 or P-521"
_MAKE = "openssl genpkey -algorithm ed25519 -out private.pem && openssl pkey -in private.pem -pubout -out public.pem"


@dataclass(frozen=True)
class PublicKey:
    """Checks signatures.

    Attributes:
        id: Hex sha256 of the 32 bytes of an Ed25519 key; of the PEM text of another, as model signing has it.
        source: Where it came from, for messages.
        is_ed25519: Which of the two kinds it is.
    """

    id: str
    source: str
    is_ed25519: bool
    _key: Any = field(repr=False, compare=False)

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether this key's owner signed this message."""
        from cryptography.exceptions import InvalidSignature

        try:
            if self.is_ed25519:
                self._key.verify(signature, message)
            else:
                self._key.verify(signature, message, _ecdsa(self._key))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """Makes signatures that its `public` half checks."""

    public: PublicKey
    _key: Any = field(repr=False, compare=False)

    def sign(self, message: bytes) -> bytes:
        """The signature: 64 bytes of Ed25519, or ECDSA in DER over the hash that goes with the curve."""
        signature: bytes = (
            self._key.sign(message) if self.public.is_ed25519 else self._key.sign(message, _ecdsa(self._key))
        )
        return signature


def read_public_key(source: str | os.PathLike[str], *, guarded: bool = False) -> PublicKey:
    """A public key from a PEM file, or from PEM text.

    Args:
        source: The file's path, or the text itself.
        guarded: Whether a file must be one that other users can neither change nor replace.

    Raises:
        UsageError: It cannot be read, or is no public key of a kind that signs packages.
        HostError: The `cryptography` package is not installed.
    """
    inline = isinstance(source, str) and "-----BEGIN" in source
    name = "the public key given as text" if inline else f"the public key {os.fspath(source)}"
    text = os.fspath(source).encode() if inline else _read(Path(source), name, guarded)
    _check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if b"PRIVATE KEY-----" in text:
        raise UsageError(
            f"{name} is a private one; it belongs to the signer alone", hint="openssl pkey -in private.pem -pubout"
        )
    try:
        return _public(load_pem_public_key(text), "text" if inline else os.fspath(source), name)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{name} is not PEM of a public key ({_first_line(error)})", hint=f"Make one: {_MAKE}"
        ) from error


def read_private_key(path: Path, ask_password: Callable[[], str]) -> PrivateKey:
    """A private key from a PEM file.

    Args:
        path: Of the file.
        ask_password: Called if the key is encrypted.

    Raises:
        UsageError: It cannot be read, the password is wrong, or it is no private key of a kind that signs packages.
        HostError: The `cryptography` package is not installed.
    """
    name = f"the private key {path}"
    text = _read(path, name, guarded=False)
    _check_installed()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        try:
            key = load_pem_private_key(text, password=None)
        except TypeError:  # it is encrypted
            key = load_pem_private_key(text, password=ask_password().encode())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # a TypeError of an empty password
        raise UsageError(
            f"{name} cannot be used: {_first_line(error)}",
            hint=f"It must be PEM, its password right. Make one: {_MAKE}",
        ) from error
    return PrivateKey(_public(key.public_key(), str(path), name), key)


def _check_installed() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise HostError(
            "signatures need the package `cryptography`, which is not installed", hint="pip install 'exportkit[sign]'"
        ) from error


def _read(path: Path, name: str, guarded: bool) -> bytes:
    try:
        return read_small(path, guarded=guarded)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{name} {error}") from error


def _public(key: object, source: str, name: str) -> PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    if isinstance(key, Ed25519PublicKey):
        return PublicKey(hashlib.sha256(key.public_bytes_raw()).hexdigest(), source, True, key)
    if isinstance(key, EllipticCurvePublicKey) and key.curve.name in _CURVES:
        text = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return PublicKey(hashlib.sha256(text).hexdigest(), source, False, key)
    if isinstance(key, EllipticCurvePublicKey):
        kind = key.curve.name
    else:
        kind = type(key).__name__.removesuffix("PublicKey").removeprefix("_")
    raise UsageError(f"{name} is of the kind {kind}; packages are signed with {_KINDS}", hint=f"Make one: {_MAKE}")


def _ecdsa(key: EllipticCurvePublicKey | EllipticCurvePrivateKey) -> ECDSA:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    by_curve = dict(zip(_CURVES, (hashes.SHA256(), hashes.SHA384(), hashes.SHA512())))
    return ECDSA(by_curve[key.curve.name])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
