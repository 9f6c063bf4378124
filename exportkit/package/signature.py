"""Makes detached signatures of packages in exportkit's own format. FORMAT.md, "Signatures", has the exact bytes.

A signature covers the digests of the manifest and the file. The manifest has the digest of every record, and the
manifest and records determine a package's bytes. So checking the signature of the manifest's digest, and then the
records' digests, checks the whole file. csrc/package does that.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.keys import SigningKey
from exportkit.package.manifest import Strict

SIGNATURE_VERSION = 1
SUFFIX = ".sig"


class Signature(Strict, frozen=True):
    """The signature by one key."""

    key_id: str
    algorithm: Literal["ed25519"]
    signature: str


class Signatures(Strict, frozen=True):
    """A signature file: the signed digests and the signatures."""

    format_version: int
    manifest_sha256: str
    file_sha256: str
    signatures: tuple[Signature, ...]


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(Signatures)


def statement(manifest_sha256: str, file_sha256: str) -> bytes:
    """Returns the bytes to sign for a package with these digests. The first line prevents other uses."""
    return (
        f"exportkit package signature {SIGNATURE_VERSION}\n"
        f"manifest-sha256 {manifest_sha256}\n"
        f"file-sha256 {file_sha256}\n"
    ).encode()


def sign(reader: PackageReader, key: SigningKey, earlier: Signatures | None = None) -> Signatures:
    """Signs an open package whose digests hold.

    Args:
        reader: The open package. The whole file is read.
        key: An Ed25519 key.
        earlier: Signatures to keep, if they belong to the same package.
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


def encode_signatures(signatures: Signatures) -> bytes:
    """Encodes as JSON, with one space of indentation and a final newline."""
    return msgspec.json.format(msgspec.json.encode(signatures, order="deterministic"), indent=1) + b"\n"


def read_signatures(path: Path) -> Signatures | None:
    """Reads a signature file without checking the signatures. Returns None if the file does not exist.

    Raises:
        SignatureError: The file is not a signature file of this version.
        UsageError: The file cannot be read.
    """
    content = core.text("ek_signatures", core.encoded(path))
    return _DECODER.decode(content) if content else None
