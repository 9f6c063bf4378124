"""Signing a package: the file that says who vouches for it."""

from __future__ import annotations

from pathlib import Path

from exportkit.errors import DigestMismatchError
from exportkit.package import openssf
from exportkit.package import signature as own
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import write_whole
from exportkit.package.keys import PrivateKey


def sign_package(
    path: Path, key: PrivateKey, output: Path | None = None, *, manifest_sha256: str | None = None
) -> Path:
    """Signs a package whose every digest holds.

    An Ed25519 key makes this format's own signature and keeps those of other signers of the same package; an elliptic
    curve key makes a bundle of OpenSSF model signing, which holds one signature.

    Args:
        path: Of the package.
        key: The signer's.
        output: The signature file; by default the package's name with `.sig`, or with `.sigstore.json` for a bundle.
        manifest_sha256: Of the package that is meant, where another may have come in its place.

    Returns:
        The signature file, written whole or not at all.

    Raises:
        UsageError: The package cannot be opened.
        DigestMismatchError: It is not the one that was meant.
        PackageError: The package is bad, or `output` is there and is no signature file.
        OSError: The signature cannot be written.
    """
    output = output or signature_path(path, key)
    with PackageReader(path) as reader:
        if manifest_sha256 not in (None, reader.manifest_sha256):
            raise DigestMismatchError(f"{path.name} was replaced by another package before it was signed")
        reader.verify()
        if key.public.is_ed25519:
            content = own.encode_signatures(own.sign(reader, key, own.read_signatures(output)))
        else:
            content = openssf.sign(path.name, reader.sha256, key)
        reader.check_unchanged()
    write_whole(output, content)
    return output


def signature_path(path: Path, key: PrivateKey) -> Path:
    """Where the signature of a package by this key goes, and is looked for."""
    return path.with_name(path.name + (own.SUFFIX if key.public.is_ed25519 else openssf.SUFFIX))
