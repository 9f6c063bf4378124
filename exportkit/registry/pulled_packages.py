"""Packages of a registry in the cache, for `exportkit serve`.

Each artifact has an entry (exportkit.runtime.cache, `pulled`) with its manifest, the package and its signatures. The
manifest's digest is the one that was asked for, and has the digest of the package's manifest; so what is there is
checked as every load checks a package, and a registry is asked only for what is not there, or is not signed as is
required now.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from exportkit.errors import PackageError
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import write_whole
from exportkit.package.trust import Trust
from exportkit.progress import Progress, silent
from exportkit.registry.oci_artifact import decode_package, fetch_package
from exportkit.registry.oci_reference import RegistryReference
from exportkit.registry.pull import pull
from exportkit.registry.registry_client import RegistryClient, RegistryOptions
from exportkit.runtime.cache import Entry, pulled_entry

_MANIFEST = "artifact.json"


@dataclass(frozen=True)
class PulledPackage:
    """A package in the cache. `exportkit cache prune` keeps it while this object lives.

    Attributes:
        path: The file. Its name is the last part of the reference's.
        reference: The reference by digest.
        was_there: Whether the registry was not needed for it.
    """

    path: Path
    reference: RegistryReference
    was_there: bool
    entry: Entry


def pulled_package(
    reference: RegistryReference,
    *,
    trust: Trust = Trust(),
    options: RegistryOptions | None = None,
    step: Progress = silent,
) -> PulledPackage:
    """Returns a package in the cache, from the registry if it is not there.

    Args:
        reference: The package. For a tag without a digest, the registry says which artifact it names now.
        trust: Whose signature is required. This machine's policies may require more.
        options: How the registry is reached.
        step: Called with each step.

    Raises:
        CacheError: The cache cannot be used.
        ExportkitError: The same errors as for `pull`.
    """
    if reference.digest is None:
        artifact = fetch_package(RegistryClient(reference, "pull", options or RegistryOptions()), reference)
        reference = reference.at(artifact.digest)
    assert reference.digest is not None
    entry = pulled_entry(reference.digest.removeprefix("sha256:"))
    path = entry.folder / reference.file_name
    was_there = _is_there(path, reference, trust)
    if not was_there:
        pulled = pull(reference, path, trust=trust, options=options, step=step)
        write_whole(entry.folder / _MANIFEST, pulled.artifact.content)
    return PulledPackage(path, reference, was_there, entry)


def _is_there(path: Path, reference: RegistryReference, trust: Trust) -> bool:
    """Whether the cache has exactly this package, signed as is required."""
    demand = trust.demand()
    with contextlib.suppress(OSError, PackageError):
        artifact = decode_package((path.parent / _MANIFEST).read_bytes(), reference)
        if not path.is_file():
            return False
        with PackageReader(path, demand=demand) as reader:
            if artifact.config.digest == f"sha256:{reader.manifest_sha256}":
                reader.verify_once(always=False)
                return True
    return False
