"""Detached signatures of packages, in this format's own form: FORMAT.md, "Signatures", has the exact bytes.

What is signed are the digests of the manifest and of the file. The manifest has every record's digest, and a package's
bytes follow from its manifest and records, so whoever checks the signature over the manifest's digest and then the
records' digests has checked the whole file. The library does the checking.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.keys import PrivateKey
from exportkit.package.manifest import Strict

SIGNATURE_VERSION = 1
SUFFIX = ".sig"


class Signature(Strict, frozen=True):
    """One signer's."""

    key_id: str
    algorithm: Literal["ed25519"]
    signature: str


class Signatures(Strict, frozen=True):
    """A signature file: what was signed, and by whom."""

    format_version: int
    manifest_sha256: str
    file_sha256: str
    signatures: tuple[Signature, ...]


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(Signatures)


def statement(manifest_sha256: str, file_sha256: str) -> bytes:
    """The bytes to sign for a package of these digests. Their first line is in nothing else that anybody signs."""
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


def encode_signatures(signatures: Signatures) -> bytes:
    """JSON with one space of indentation and a final newline."""
    return msgspec.json.format(msgspec.json.encode(signatures, order="deterministic"), indent=1) + b"\n"


def read_signatures(path: Path) -> Signatures | None:
    """The content of a signature file, whose form is right; None where there is none.

    Raises:
        SignatureError: It is no signature file of this version.
        UsageError: It may not be read.
    """
    content = core.text("ek_signatures", core.encoded(path))
    return _DECODER.decode(content) if content else None
