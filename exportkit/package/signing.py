"""Signing a package: the file that says who vouches for it."""

from __future__ import annotations

from pathlib import Path

from exportkit.package import openssf
from exportkit.package import signature as own
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import written_whole
from exportkit.package.keys import PrivateKey


def sign_package(path: Path, key: PrivateKey, output: Path | None = None) -> Path:
    """Signs a package whose every digest holds.

    An Ed25519 key makes this format's own signature and keeps those of other signers of the same package; an elliptic
    curve key makes a bundle of OpenSSF model signing, which holds one signature.

    Args:
        path: Of the package.
        key: The signer's.
        output: The signature file; by default the package's name with `.sig`, or with `.sigstore.json` for a bundle.

    Returns:
        The signature file, written whole or not at all.

    Raises:
        UsageError: The package cannot be opened.
        PackageError: The package is bad, or `output` is there and is no signature file.
        OSError: The signature cannot be written.
    """
    output = output or signature_path(path, key)
    with PackageReader(path) as reader:
        reader.verify()
        if key.public.is_ed25519:
            there = own.read_signature_file(output)
            earlier = None if there is None else own.decode_signatures(there, output.name)
            content = own.encode_signatures(own.sign(reader, key, earlier))
        else:
            content = openssf.sign(path.name, reader.sha256, key)
        reader.check_unchanged()
    with written_whole(output) as file:
        file.write(content)
    return output


def signature_path(path: Path, key: PrivateKey) -> Path:
    """Where the signature of a package by this key goes, and is looked for."""
    return path.with_name(path.name + (own.SUFFIX if key.public.is_ed25519 else openssf.SUFFIX))
