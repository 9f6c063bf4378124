"""Gets a package and its signatures from a registry, and gives them their names when all was checked."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exportkit.errors import ArtifactError, ExportkitError, HostError, PackageError, SignatureMissingError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import check_writable
from exportkit.package.keys import PublicKey
from exportkit.package.signature import SUFFIX, Signatures
from exportkit.package.trust import Trust, check_trust
from exportkit.progress import Progress, bytes_text, silent
from exportkit.registry.blob_download import download
from exportkit.registry.oci_artifact import SIGNATURE_LAYERS, PackageArtifact, fetch_package
from exportkit.registry.oci_reference import RegistryReference
from exportkit.registry.referrers import FoundSignature, fetch_signatures
from exportkit.registry.registry_client import RegistryClient, RegistryOptions


@dataclass(frozen=True)
class Pulled:
    """What `pull` wrote.

    Attributes:
        reference: The package in the registry, by its digest.
        path: The file.
        sha256: Its digest.
        size: Its size.
        signatures: The files of signatures beside it.
        signers: The keys whose signatures satisfied the caller and then each policy; empty if none was required.
        artifact: The artifact that it came from.
    """

    reference: RegistryReference
    path: Path
    sha256: str
    size: int
    signatures: tuple[Path, ...]
    signers: tuple[PublicKey, ...]
    artifact: PackageArtifact


def pull(
    reference: RegistryReference,
    output: Path,
    *,
    trust: Trust = Trust(),
    options: RegistryOptions | None = None,
    max_bytes: int | None = None,
    step: Progress = silent,
) -> Pulled:
    """Gets a package. The file appears only when its digest and the required signatures were checked.

    What a cut left lies in a hidden folder beside the output, and the next call goes on with it.

    Args:
        reference: The package.
        output: The `.pt2` to write. An existing file is replaced, with the signature files beside it.
        trust: Whose signature is required. This machine's policies may require more.
        options: How the registry is reached.
        max_bytes: The largest file that is taken. Default: what the disk has room for.
        step: Called with each step.

    Raises:
        UsageError: There is no such package, or the output cannot be written.
        PackageError: The artifact is not a package, is not what its digest says, or lacks a required signature.
        PolicyError: A policy cannot be read or trusted.
        RegistryError: The registry cannot be reached, or refuses.
    """
    demanded = trust.demanded_by()
    client = RegistryClient(reference, "pull", options or RegistryOptions())
    artifact = fetch_package(client, reference)
    size = artifact.layer.size
    if max_bytes is not None and size > max_bytes:
        raise ArtifactError(f"{reference} has {bytes_text(size)}, and --max-size allows {bytes_text(max_bytes)}")
    found = [] if trust.signature is not None else fetch_signatures(client, artifact.digest)
    if demanded and not found and trust.signature is None:
        raise SignatureMissingError(
            f"{reference} has no signature in the registry, and {demanded} requires one",
            hint="Who made the package signs it with `exportkit sign` and pushes it again.",
        )
    with _workplace(output, artifact.digest) as folder:
        part = folder / output.name
        have = part.stat().st_size if part.exists() else 0
        check_writable(output, max(size - have, 0))
        step(f"getting {bytes_text(size)} from {reference.host}" + (f", {bytes_text(have)} are here" if have else ""))
        download(client, artifact.layer, part)
        signatures, signers = _checked(part, artifact, found, trust, demanded is not None)
        written = _place(part, output, signatures)
        if trust.signature is None:
            _remove_others(output, signatures)
    digest = artifact.layer.digest.removeprefix("sha256:")
    return Pulled(reference.at(artifact.digest), output, digest, size, written, signers, artifact)


@contextlib.contextmanager
def _workplace(output: Path, digest: str) -> Iterator[Path]:
    """Makes the hidden folder for one artifact beside the output, of this user alone. A cut leaves it.

    It is removed at the end, and after an error of the package: there is nothing to go on with.
    """
    check_writable(output)
    folder = output.parent / f".{output.name}.{digest.removeprefix('sha256:')[:16]}.pull"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{folder} is in the way: {error.strerror}", hint="Remove it.") from error
    try:
        status = os.fstat(file)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise UsageError(f"{folder} is in the way: others may change it", hint="Remove it.")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HostError(f"another process pulls {output} now", hint="Wait until it has ended.") from error
        except OSError:
            pass  # a file system without locks
        try:
            yield folder
        except PackageError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(file)


def _checked(
    part: Path, artifact: PackageArtifact, found: Sequence[FoundSignature], trust: Trust, demanded: bool
) -> tuple[dict[str, bytes], tuple[PublicKey, ...]]:
    """Checks the file whose digest holds. Returns the signatures to keep, by suffix, and who signed."""
    with PackageReader(part) as reader:
        if artifact.config.digest != f"sha256:{reader.manifest_sha256}":
            raise ArtifactError(f"the artifact {artifact.digest} has the manifest of another package as its config")
        if trust.signature is not None:
            return {}, check_trust(reader, trust.keys or None, trust.signature)
        if not demanded:  # a policy may still have revoked the package, or who signed it
            fitting = _fitting(found, reader.manifest_sha256)
            _write_beside(part, fitting)
            return fitting, check_trust(reader)
        refused: ExportkitError | None = None
        for signatures in _choices(found):
            _write_beside(part, signatures)
            try:
                return signatures, check_trust(reader, trust.keys or None)
            except PackageError as error:
                refused = refused or error
        assert refused is not None
        raise refused


def _by_suffix(found: Iterable[FoundSignature]) -> dict[str, list[bytes]]:
    every: dict[str, list[bytes]] = {suffix: [] for suffix in SIGNATURE_LAYERS}
    for signature in found:
        every[signature.suffix].append(signature.content)
    return {suffix: contents for suffix, contents in every.items() if contents}


def _choices(found: Sequence[FoundSignature]) -> Iterator[dict[str, bytes]]:
    """Yields every choice of one signature file of each kind: anybody who may push may have added bad ones."""
    every = _by_suffix(found)
    for choice in itertools.product(*every.values()):
        yield dict(zip(every, choice))


def _fitting(found: Sequence[FoundSignature], manifest_sha256: str) -> dict[str, bytes]:
    """Chooses where nobody checks: of exportkit's own kind, the file for this package with the most signatures."""
    every, kept = _by_suffix(found), {}
    for suffix, contents in every.items():
        fits = {content: _signed(content, manifest_sha256) if suffix == SUFFIX else 1 for content in contents}
        best = max(contents, key=lambda content: fits[content])
        if fits[best]:
            kept[suffix] = best
    return kept


def _signed(content: bytes, manifest_sha256: str) -> int:
    try:
        read = msgspec.json.decode(content, type=Signatures)
    except msgspec.DecodeError:
        return 0
    return len(read.signatures) if read.manifest_sha256 == manifest_sha256 else 0


def _write_beside(part: Path, signatures: dict[str, bytes]) -> None:
    for suffix, content in signatures.items():
        part.with_name(part.name + suffix).write_bytes(content)


def _place(part: Path, output: Path, signatures: dict[str, bytes]) -> tuple[Path, ...]:
    """Gives the files their names, the package's last."""
    _write_beside(part, signatures)
    written = []
    for suffix in signatures:
        signature = output.with_name(output.name + suffix)
        os.replace(part.with_name(part.name + suffix), signature)
        written.append(signature)
    os.replace(part, output)
    return tuple(written)


def _remove_others(output: Path, signatures: dict[str, bytes]) -> None:
    """Removes the signatures of what was there before: beside the new package, they would be refused."""
    for suffix in SIGNATURE_LAYERS:
        if suffix not in signatures:
            output.with_name(output.name + suffix).unlink(missing_ok=True)
