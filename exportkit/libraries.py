"""The operator libraries loaded in this process: one namespace, one build, once.

Loading a second library that defines an already registered namespace ends the process (a crash inside the library's
static initialisers, not an exception), so every load goes through `load_library`, which looks before it leaps.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from exportkit.errors import LibraryConflictError, LibraryLoadError

LIBRARY_DIR = Path(__file__).parent / "lib"  # where the build puts our own

_lock = threading.RLock()
_loaded: dict[str, LoadedLibrary] = {}  # by sha256


@dataclass(frozen=True)
class LoadedLibrary:
    """An operator library of this process.

    Attributes:
        path: The file it was loaded from.
        sha256: Digest of that file.
        schemas: Operator name with overload (`ns::op` or `ns::op.overload`) to schema, for the operators it defined.
            Empty for a library that only adds kernels to operators defined elsewhere.
    """

    path: Path
    sha256: str
    schemas: Mapping[str, str]


def load_library(path: Path, *, defines: Collection[str] = ()) -> LoadedLibrary:
    """Loads an operator library, or returns the same build if this process already has it.

    Args:
        path: The shared library.
        defines: The operator namespaces it is known to define, to be compared with what is registered before the
            dynamic linker runs any of its code.

    Raises:
        LibraryConflictError: Another build of one of the namespaces, or of the file of this name, is loaded.
        LibraryLoadError: The dynamic linker refused the file.
    """
    import torch

    path = Path(path).resolve()
    with _lock:
        sha256 = file_sha256(path)
        if sha256 in _loaded:
            return _loaded[sha256]
        if mapped := _mapped_copy(path, sha256):
            schemas = {name: schema for ns in defines for name, schema in registered_schemas(ns).items()}
            return _loaded.setdefault(sha256, LoadedLibrary(mapped, sha256, schemas))
        _refuse_conflict(path, sha256, defines)
        before = registered_schemas()
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise LibraryLoadError(
                f"the dynamic linker refused {path.name}: {error.__cause__ or error}",
                hint="An undefined torch symbol means a library built for another torch; rebuild it for this one.",
            ) from error
        defined = {name: schema for name, schema in registered_schemas().items() if name not in before}
        return _loaded.setdefault(sha256, LoadedLibrary(path, sha256, defined))


def registered_schemas(namespace: str | None = None) -> dict[str, str]:
    """Schemas by operator name with overload: those of one namespace, or all that the dispatcher knows."""
    import torch

    schemas = {}
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if namespace is None or name.startswith(f"{namespace}::"):
            schemas[name] = str(schema)
    return schemas


def host_platform() -> str:
    """What a target or library must be compiled for to run here, such as "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine()}"


def built_in_libraries() -> dict[str, Path]:
    """Our own operator libraries that were built, by device (`cpu`, `cuda`)."""
    built = {device: LIBRARY_DIR / f"libarr_coc_{device}.so" for device in ("cpu", "cuda")}
    return {device: path for device, path in built.items() if path.exists()}


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _mapped_copy(path: Path, sha256: str) -> Path | None:
    """A file with this content that something else (a plain dlopen, an import) already mapped into the process."""
    size = path.stat().st_size
    with open("/proc/self/maps") as maps:
        files = {fields[5].rstrip("\n") for line in maps if len(fields := line.split(maxsplit=5)) == 6}
    for file in map(Path, sorted(files)):
        if file.suffix == ".so" and file.exists() and file.stat().st_size == size and file_sha256(file) == sha256:
            return file
    return None


def _refuse_conflict(path: Path, sha256: str, defines: Collection[str]) -> None:
    for other in _loaded.values():
        if other.path.name == path.name:
            raise LibraryConflictError(
                f"another build of {path.name} is loaded in this process: sha256 {other.sha256} from {other.path}; "
                f"this one is {sha256}",
                hint="One process holds one build of a library. Use a second process, or one build for both.",
            )
    for namespace in sorted(defines):
        if registered := registered_schemas(namespace):
            owner = next((lib for lib in _loaded.values() if registered.keys() & lib.schemas.keys()), None)
            loaded_from = f"sha256 {owner.sha256} from {owner.path}" if owner else "a build exportkit did not load"
            raise LibraryConflictError(
                f"operator namespace `{namespace}` is already registered by {loaded_from}; {path.name} (sha256 "
                f"{sha256}) defines it too. Registered: {'; '.join(sorted(registered.values()))}",
                hint="One process holds one build of a namespace. Use a second process, or the same file for both.",
            )
