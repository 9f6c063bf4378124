"""Detached signatures of packages, in this format's own form: FORMAT.md, "Signatures", has the exact bytes.

What is signed are the digests of the manifest and of the file. The manifest has every record's digest, and a package's
bytes follow from its manifest and records, so whoever checks the signature over the manifest's digest and then the
records' digests has checked the whole file.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from exportkit.errors import SignatureError, UsageError
from exportkit.package import strict_json
from exportkit.package.archive import PackageReader
from exportkit.package.keys import PrivateKey, PublicKey
from exportkit.package.manifest import Sha256, Strict
from exportkit.package.small_files import read_small

SIGNATURE_VERSION = 1
SUFFIX = ".sig"

MAX_DEPTH = 4  # of brackets

# 64 bytes have one spelling: the last letter before the padding holds two bits of them, and its other four are zero.
Base64Signature = Annotated[str, Meta(pattern=r"^[A-Za-z0-9+/]{85}[AQgw]==\Z")]


class Signature(Strict, frozen=True):
    """One signer's."""

    key_id: Sha256
    algorithm: Literal["ed25519"]
    signature: Base64Signature


class Signatures(Strict, frozen=True):
    """A signature file: what was signed, and by whom."""

    format_version: int
    manifest_sha256: Sha256
    file_sha256: Sha256
    signatures: Annotated[tuple[Signature, ...], Meta(min_length=1)]

    def statement(self) -> bytes:
        """The bytes that each signer signed. Its first line says what they are, so that they mean nothing elsewhere."""
        return statement(self.manifest_sha256, self.file_sha256)


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(Signatures)


def statement(manifest_sha256: str, file_sha256: str) -> bytes:
    """The bytes to sign for a package of these digests."""
    return (
        f"exportkit package signature {SIGNATURE_VERSION}\n"
        f"manifest-sha256 {manifest_sha256}\n"
        f"file-sha256 {file_sha256}\n"
    ).encode()


def sign(reader: PackageReader, key: PrivateKey, earlier: Signatures | None = None) -> Signatures:
    """Signs an open package whose digests hold.

    Args:
        reader: Of the package; all of it is read.
        key: An Ed25519 key.
        earlier: Signatures to keep beside the new one, if they are of this very package.
    """
    digests = reader.manifest_sha256, reader.sha256
    made = Signature(
        key_id=key.public.id,
        algorithm="ed25519",
        signature=base64.b64encode(key.sign(statement(*digests))).decode(),
    )
    kept: tuple[Signature, ...] = ()
    if earlier is not None and (earlier.manifest_sha256, earlier.file_sha256) == digests:
        kept = tuple(other for other in earlier.signatures if other.key_id != made.key_id)
    return Signatures(
        format_version=SIGNATURE_VERSION,
        manifest_sha256=digests[0],
        file_sha256=digests[1],
        signatures=(*kept, made),
    )


def signer(signatures: Signatures, manifest_sha256: str, keys: tuple[PublicKey, ...], name: str) -> PublicKey | None:
    """The first of the keys whose signature of this package holds; None where none of them has signed.

    Args:
        signatures: Of the file `name`.
        manifest_sha256: Of the package.
        keys: Any of them will do.
        name: Of the signature file, for messages.

    Raises:
        SignatureError: The file is of another package, or no key's signature holds and one was there.
    """
    if signatures.manifest_sha256 != manifest_sha256:
        raise SignatureError(
            f"{name} is the signature of another package: of one whose manifest has sha256 "
            f"{signatures.manifest_sha256}, and this one's has {manifest_sha256}",
            hint="The package was changed or exchanged after it was signed, or the signature is of another build.",
        )
    given = {signature.key_id: base64.b64decode(signature.signature) for signature in signatures.signatures}
    present = [key for key in keys if key.id in given]
    for key in present:
        if key.verifies(given[key.id], signatures.statement()):
            return key
    if present:
        raise SignatureError(
            f"{name}: the signature by key {present[0].id} ({present[0].source}) does not hold",
            hint="The signature file was changed after it was written. Get it again.",
        )
    return None


def encode_signatures(signatures: Signatures) -> bytes:
    """JSON with one space of indentation and a final newline."""
    return msgspec.json.format(msgspec.json.encode(signatures, order="deterministic"), indent=1) + b"\n"


def decode_signatures(data: bytes, name: str) -> Signatures:
    """Reads a signature file strictly.

    Args:
        data: Its content.
        name: Of the file, for messages.

    Raises:
        SignatureError: It is no signature file of this version.
    """
    try:
        value = strict_json.parse(data, max_depth=MAX_DEPTH)
    except ValueError as error:
        raise SignatureError(f"the signature file {name} {error}") from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if type(version) is int and version != SIGNATURE_VERSION:
        raise SignatureError(
            f"the signature file {name} has format version {version}; this exportkit reads {SIGNATURE_VERSION}",
            hint="Install an exportkit that reads it, or sign the package again.",
        )
    try:
        signatures = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise SignatureError(f"the signature file {name} is not of the shape FORMAT.md gives: {error}") from error
    ids = [signature.key_id for signature in signatures.signatures]
    if repeated := next((key_id for key_id in ids if ids.count(key_id) > 1), None):
        raise SignatureError(f"the signature file {name} has two signatures by key {repeated}")
    return signatures


def read_signature_file(path: Path) -> bytes | None:
    """The content of a signature file of either form; None where there is none.

    Raises:
        SignatureError: It is no plain file, or larger than 64 KiB.
        UsageError: It may not be read.
    """
    try:
        return read_small(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read the signature file {path}: {error.strerror}") from error
    except ValueError as error:
        raise SignatureError(f"the signature file {path.name} {error}") from error
