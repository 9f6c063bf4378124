"""Signs packages. A signature is a file beside the package."""

from __future__ import annotations

from pathlib import Path

from exportkit.errors import DigestMismatchError
from exportkit.package import openssf
from exportkit.package import signature as own
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import write_whole
from exportkit.package.keys import SigningKey


def sign_package(
    path: Path, key: SigningKey, output: Path | None = None, *, manifest_sha256: str | None = None
) -> Path:
    """Checks every digest of a package and signs it.

    An Ed25519 key makes exportkit's own signature and keeps the signatures of other keys in the file. An elliptic curve
    key makes a bundle of OpenSSF model signing, which holds one signature.

    Args:
        path: The package.
        key: The private key, or a command that has it.
        output: The signature file. Default: the package's name with `.sig`, or `.sigstore.json` for a bundle.
        manifest_sha256: The manifest's expected digest, in case the package may have been replaced; None skips this
            check.

    Returns:
        The signature file, which is written atomically.

    Raises:
        UsageError: The package cannot be opened.
        DigestMismatchError: The manifest has another digest than expected.
        PackageError: The package is bad, or `output` exists but is not a signature file.
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


def signature_path(path: Path, key: SigningKey) -> Path:
    """Returns the default path of a package's signature by this key."""
    return path.with_name(path.name + (own.SUFFIX if key.public.is_ed25519 else openssf.SUFFIX))
