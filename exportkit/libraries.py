"""Loads operator libraries. A process can load only one build of an operator namespace, and only once.

A second library that defines a registered namespace crashes the process in its static initialisers instead of raising
an exception. So every load is checked first. csrc/runtime/operators.cpp does the same for programs without Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exportkit.child.probe import registrations
from exportkit.errors import LibraryConflictError, LibraryLoadError
from exportkit.schema_text import schema_text

LIBRARY_DIR = Path(__file__).parent / "lib"  # the build writes the package reader and the runtime here

# The namespaces that torch registers: those of `import torch`, and below them those of its compiler, which export uses.
# Packages do not carry operators of these namespaces. One that a newer torch adds is taken for a library's.
_TORCH_NAMESPACES = (
    "_c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test aten c10d debug_mode_ops debugprims "
    "export inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn prepacked prims profiler quantization quantized "
    "rngprims sparse static_runtime symm_mem "
    "_native_aot coor flex_gemm mempool "
    "_inductor_test c10d_functional flex_lib fsdp onnx onnx_symbolic quantized_decomposed streams"
)
TORCH_NAMESPACES = frozenset(_TORCH_NAMESPACES.split())

# Those of exportkit's own library (exportkit.recurrent). What they compute never changes, so that packages of several
# versions of exportkit go together in one process: the build that came first serves all. csrc/runtime has the same.
OWN_NAMESPACE = "exportkit_recurrent"

# A line of /proc/self/maps: addresses, permissions, offset, device, inode, path.
_EXECUTABLE_MAPPING = re.compile(r"^\S+ ..x\S \S+ \S+ (\d+) +(/.+)$", re.MULTILINE)

# A library that defines operators imports one of these functions: from the stable ABI, TORCH_LIBRARY, or its
# predecessor. A library that only adds kernels to another library's operators imports none of them.
_DEFINING_SYMBOLS = (
    b"\0aoti_torch_library_init_def\0",
    b"\0aoti_torch_library_init_fragment\0",
    b"\0_ZNR5torch7Library4_defE",
    b"\0_ZN3c1017RegisterOperators",
)

_CONFLICT_HINT = (
    "One process holds one build: bring the same file with both, or run one package in a process of its own, with "
    "exportkit.load(..., isolate=True)."
)
_SHOWN_SCHEMAS = 40
_BLOCK = 1 << 18  # bytes to search at a time

_process = ctypes.CDLL(None)
_process.dlopen.argtypes, _process.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
_process.dlerror.argtypes, _process.dlerror.restype = (), ctypes.c_char_p

# Held between checking what is registered and loading a library, so that nothing is registered in between.
loading = threading.RLock()
_loaded: dict[str, LoadedLibrary] = {}  # by sha256


class LoadedLibrary(NamedTuple):
    """An operator library that this process loaded. One that only adds kernels to others defines no namespaces."""

    path: Path
    sha256: str
    namespaces: frozenset[str]


# A fork waits for the lock: in the child, a load by another thread would never finish.
os.register_at_fork(before=loading.acquire, after_in_parent=loading.release, after_in_child=loading.release)


def load_library(path: Path, *, defines: Collection[str] = (), beside: Sequence[LoadedLibrary] = ()) -> LoadedLibrary:
    """Loads an operator library, or returns the same build if this process already has it.

    The namespaces that it is known to define are compared with the registered ones before the dynamic linker runs any
    code. Where they are not known, and the library can define operators, another process finds out which ones, which
    takes seconds. Libraries `beside` it belong together with it and were loaded before: they may define other operators
    of the same namespaces.

    Raises:
        LibraryConflictError: Another build of a namespace is loaded, or another build of a file with this name that
            only adds kernels.
        LibraryLoadError: The dynamic linker refused the file, or it cannot be found out what it defines.
    """
    path = Path(path).resolve()
    with loading:
        try:
            sha256, size = file_sha256(path), path.stat().st_size
        except OSError as error:
            raise LibraryLoadError(f"cannot read the operator library {path}: {error.strerror}") from error
        known = loaded_library(sha256, size, defines=defines)
        return known or load_verified(path, sha256, defines=defines, beside=beside)


def load_verified(
    path: Path,
    sha256: str,
    *,
    defines: Collection[str] = (),
    schemas: Mapping[str, str] | None = None,
    beside: Sequence[LoadedLibrary] = (),
) -> LoadedLibrary:
    """Loads a file whose digest was just checked and that `loaded_library` does not know, as `load_library`.

    The schemas are the known ones by operator: a conflict's message compares them with the registered ones.
    """
    with loading:
        if sha256 in _loaded:  # another thread loaded it meanwhile
            return _loaded[sha256]
        namespaces, before = set(defines), set[str]()
        if can_define := bool(defines) or _can_define(path):
            if not defines and _namespaces_of(_operator_names()) - TORCH_NAMESPACES:  # else nothing conflicts
                schemas = _definitions(path, beside)
                namespaces = _namespaces_of(schemas)
            if _is_served(path, namespaces, schemas, beside):
                return _loaded.setdefault(sha256, LoadedLibrary(path, sha256, frozenset(namespaces)))
            _refuse_second_definition(path, sha256, namespaces, schemas, beside)
        else:
            _refuse_other_kernels(path, sha256)
        if can_define and not namespaces:
            before = _operator_names()
        _open(path)
        if can_define and not namespaces:
            namespaces = _namespaces_of(_operator_names() - before)
        return _loaded.setdefault(sha256, LoadedLibrary(path, sha256, frozenset(namespaces)))


def loaded_library(sha256: str, size: int, *, defines: Collection[str] = ()) -> LoadedLibrary | None:
    """Returns the library with this content if this process has loaded it, by exportkit or otherwise.

    Files of another size are not read. `defines` are its known namespaces, in case exportkit did not load it.
    """
    with loading:
        if sha256 not in _loaded and (mapped := _mapped_copy(sha256, size)):
            _loaded[sha256] = LoadedLibrary(mapped, sha256, frozenset(defines))
        return _loaded.get(sha256)


def loaded_libraries() -> tuple[LoadedLibrary, ...]:
    """Returns the libraries that exportkit has loaded into this process, in that order."""
    return tuple(_loaded.values())


def registered_schemas(namespace: str) -> dict[str, str]:
    """Returns the registered schemas of a namespace by operator name with overload."""
    return schemas_of(_in_namespaces(_operator_names(), [namespace]))


def schemas_of(names: Iterable[str]) -> dict[str, str]:
    """Returns the texts of the schemas of the given operators (`ns::op` or `ns::op.overload`) that are registered."""
    import torch

    names = set(names)
    schemas = {}
    for base in {name.partition(".")[0] for name in names}:
        for schema in torch._C._jit_get_schemas_for_operator(base):
            name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            if name in names:
                schemas[name] = schema_text(schema)
    return dict(sorted(schemas.items()))


def host_platform() -> str:
    """Returns the platform of targets and libraries that run here, such as "linux-x86_64"."""
    return f"{sys.platform}-{platform.machine()}"


def file_sha256(path: Path) -> str:
    """Returns the hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _in_namespaces(operators: Iterable[str], namespaces: Iterable[str]) -> list[str]:
    prefixes = tuple(f"{namespace}::" for namespace in namespaces)
    return [name for name in operators if name.startswith(prefixes)] if prefixes else []


def _operator_names() -> set[str]:
    """Returns every operator that the dispatcher knows, with overload. Some may have kernels but no schema yet."""
    import torch

    return set(torch._C._dispatch_get_all_op_names())


def _namespaces_of(names: Iterable[str]) -> set[str]:
    return {name.partition("::")[0] for name in names}


def mapped_files() -> list[tuple[Path, os.stat_result]]:
    """Returns the files whose code is mapped into the process and that still exist."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        mapped = set(_EXECUTABLE_MAPPING.findall(maps.read()))
    files = []
    for inode, name in sorted(mapped):
        try:
            status = os.stat(name)
        except OSError:
            continue  # deleted
        # After an upgrade the path may name another file than the mapped one.
        if status.st_ino == int(inode):
            files.append((Path(name), status))
    return files


def mapped_beside_torch() -> list[Path]:
    """Returns the files whose code is mapped into the process and that are not torch's own."""
    import torch

    # An installer may put a link to torch there. What is mapped has the path without it.
    folder = Path(torch.__file__).resolve().parent
    return [path for path, _ in mapped_files() if not path.is_relative_to(folder)]


def _mapped_copy(sha256: str, size: int) -> Path | None:
    """Returns a file with this content that the process mapped without exportkit, by dlopen or an import."""
    for path, status in mapped_files():
        with contextlib.suppress(OSError):
            if status.st_size == size and file_sha256(path) == sha256:
                return path
    return None


def _can_define(path: Path) -> bool:
    """Whether a library calls a function that defines operators."""
    overlap, block = max(map(len, _DEFINING_SYMBOLS)), b""
    with open(path, "rb", buffering=0) as file:
        while read := file.read(_BLOCK):
            block = block[-overlap:] + read
            if any(symbol in block for symbol in _DEFINING_SYMBOLS):
                return True
    return False


def _open(path: Path) -> None:
    """Loads a library without the GIL, which `ctypes.CDLL` may hold while the library's initialisers run."""
    if not _process.dlopen(os.fsencode(path), os.RTLD_NOW | os.RTLD_LOCAL):
        said = (_process.dlerror() or b"").decode(errors="backslashreplace")
        raise LibraryLoadError(f"the dynamic linker refused {path.name}: {said}", hint=_hint(said))


def _definitions(path: Path, beside: Sequence[LoadedLibrary]) -> Mapping[str, str]:
    """Returns the operators that a library defines, which another process finds out."""
    return registrations(*(library.path for library in beside), path)[-1].defines


def _is_served(
    path: Path, namespaces: Collection[str], schemas: Mapping[str, str] | None, beside: Sequence[LoadedLibrary]
) -> bool:
    """Tells whether another build of exportkit's own library is loaded that has the operators of this one."""
    if set(namespaces) != {OWN_NAMESPACE} or not (there := registered_schemas(OWN_NAMESPACE)):
        return False
    here = _definitions(path, beside) if schemas is None else schemas
    wanted = _in_namespaces(here, [OWN_NAMESPACE])
    return all(there.get(name) == here[name] for name in wanted)


def _refuse_second_definition(
    path: Path,
    sha256: str,
    defines: Collection[str],
    schemas: Mapping[str, str] | None,
    beside: Sequence[LoadedLibrary],
) -> None:
    """Refuses another build of registered namespaces, because dlopen would end the process."""
    for namespace in sorted(defines):
        if there := registered_schemas(namespace):
            known = _definitions(path, beside) if schemas is None else schemas
            here = {name: known[name] for name in _in_namespaces(known, [namespace])}
            if any(namespace in library.namespaces for library in beside) and not here.keys() & there.keys():
                continue
            raise LibraryConflictError(
                f"operator namespace `{namespace}` is already registered, by {_owner_of(namespace)}; {path.name} "
                f"(sha256 {sha256}) defines it too{_differences(there, here)}",
                hint=_CONFLICT_HINT,
            )


def _refuse_other_kernels(path: Path, sha256: str) -> None:
    """Refuses another build of a library that adds kernels, because it would replace the first one's kernels."""
    for other in _loaded.values():
        if other.path.name == path.name and not other.namespaces:
            raise LibraryConflictError(
                f"another build of {path.name} is loaded in this process: sha256 {other.sha256} from {other.path}; "
                f"this one is sha256 {sha256}",
                hint=_CONFLICT_HINT,
            )


def _owner_of(namespace: str) -> str:
    """Says which library registered a namespace, if that can be found out."""
    for library in _loaded.values():
        if namespace in library.namespaces:
            return f"sha256 {library.sha256} from {library.path}"
    import torch

    dumped = torch._C._dispatch_dump(next(iter(registered_schemas(namespace))))
    at = next(line.removeprefix("debug: ") for line in dumped.splitlines() if line.startswith("debug: "))
    known = {library.path for library in _loaded.values()}
    others = [path for path in mapped_beside_torch() if path not in known and not path.is_relative_to(LIBRARY_DIR)]
    files = [] if ".py:" in at else [path for path in others if _can_define(path)]
    found = " or ".join(f"sha256 {file_sha256(path)} from {path}" for path in files)
    return f"{found or 'code'} ({at}), which exportkit did not load"


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Lists the changes of a second build, one per line."""
    both = sorted(there.keys() & here.keys())
    same = {name for name in both if there[name] == here[name]}
    lines = [f"registered as {there[name]}, in this file {here[name]}" for name in both if name not in same]
    lines += [f"registered only: {there[name]}" for name in sorted(there.keys() - here.keys())]
    lines += [f"in this file only: {here[name]}" for name in sorted(here.keys() - there.keys())]
    lines += [f"the same in both: {there[name]}" for name in both if name in same]
    more = [f"and {len(lines) - _SHOWN_SCHEMAS} operators more"] if len(lines) > _SHOWN_SCHEMAS else []
    return "".join(f"\n    {line}" for line in lines[:_SHOWN_SCHEMAS] + more)


def _hint(complaint: str) -> str:
    """Returns advice on an error of the dynamic linker."""
    if "failed to map segment" in complaint:
        return "Its directory is mounted noexec: set EXPORTKIT_CACHE to a directory that may hold code."
    if "undefined symbol" in complaint:
        return "An undefined torch symbol means a library built for another torch; rebuild it for this one."
    return "`ldd` says which of the libraries it needs are missing here."
