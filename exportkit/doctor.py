"""Finds out what this machine can export, compile and load, and what is missing."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from exportkit.errors import ExportkitError
from exportkit.installed import libraries_of, operator_namespaces
from exportkit.progress import Progress, silent
from exportkit.support import EXPORTING_TORCHES, LACKS, OLDEST_TORCH, PYTHONS, exporting_torches

_INSTALL_TORCH = f"pip install 'torch>={OLDEST_TORCH}'"


@dataclass(frozen=True)
class HostFinding:
    """The result of one check: whether a part such as "compiler" is present and usable, what it is, and what to do."""

    name: str
    ok: bool
    detail: str
    hint: str | None = None


@dataclass(frozen=True)
class Capability:
    """A capability of this machine. It needs the findings in `missing`, which failed."""

    name: str
    ok: bool
    missing: tuple[str, ...]


@dataclass(frozen=True)
class HostReport:
    """All findings and capabilities."""

    findings: tuple[HostFinding, ...]
    capabilities: tuple[Capability, ...]


_LOADING = ("platform", "torch", "package reader", "policies", "cache")
_COMPILING = ("platform", "torch", "torch patches", "package reader", "compiler", "temporary files")
_WORKERS = ("platform", "torch", "policies", "temporary files", "worker processes")

# The findings that each capability needs. Every machine for exportkit should have the first three capabilities.
_NEEDS: dict[str, tuple[str, ...]] = {
    "load and run a CPU package": _LOADING,
    "export an ExportedProgram": ("torch", "torch patches", "package reader"),
    "compile for the CPU": _COMPILING,
    "check signatures": ("package reader", "signatures"),
    "export and verify ONNX models": ("torch", "package reader", "ONNX"),
    "load and run a CUDA package": (*_LOADING, "CUDA device"),
    "compile for CUDA": (*_COMPILING, "CUDA device"),
    "build CUDA operators": ("compiler", "nvcc"),
    "run calls as CUDA graphs": ("torch", "C++ runtime", "CUDA device", "CUDA graphs"),
    "run packages in worker processes (isolate=True)": _WORKERS,
}
BASIC = ("load and run a CPU package", "export an ExportedProgram", "compile for the CPU")


def diagnose(progress: Progress = silent) -> HostReport:
    """Checks this machine. Imports torch and Inductor, compiles once and loads each operator library in a process."""
    progress("checking torch and the machine")
    findings = [_python(), _platform(), _torch(), _if_torch("libstdc++", _libstdcxx)]
    findings.append(_looked("package reader", _package_reader))
    findings += [_signatures(), _if_reader("policies", _policies), _onnx(), _if_reader("CPU", _cpu)]
    findings += [_if_torch("C++ runtime", _runtime), _if_torch("CUDA device", _cuda_device)]
    findings += [_if_torch("CUDA graphs", _cuda_graphs), _if_torch("worker processes", _worker_processes)]
    progress("comparing torch with what export replaces in it")
    findings.append(_if_torch("torch patches", _torch_patches))
    progress("compiling a probe")
    findings += [_if_torch("compiler", _compiler), _nvcc(), _temporary_files()]
    findings.append(_if_reader("cache", _cache))
    progress("loading the operator libraries")
    needed = dict(_NEEDS)
    for namespace in filter(_has_libraries, operator_namespaces()):
        libraries = {device: f"{namespace} on {device.upper()}" for device in ("cpu", "cuda")}
        findings += [_if_torch(name, partial(_library, namespace, device)) for device, name in libraries.items()]
        needed[f"use the {namespace} operators on the CPU"] = ("platform", "torch", libraries["cpu"])
        needed[f"use the {namespace} operators on CUDA"] = ("platform", "torch", *libraries.values(), "CUDA device")
    state = {finding.name: finding.ok for finding in findings}
    capabilities = []
    for name, needs in needed.items():
        missing = tuple(need for need in needs if not state[need])
        capabilities.append(Capability(name, not missing, missing))
    return HostReport(tuple(findings), tuple(capabilities))


def _if_torch(name: str, look: Callable[[], HostFinding]) -> HostFinding:
    """Makes a check that needs torch."""
    if importlib.util.find_spec("torch") is None:
        return HostFinding(name, False, "not checked without torch", "Install torch first.")
    return _looked(name, look)


def _if_reader(name: str, look: Callable[[], HostFinding]) -> HostFinding:
    """Makes a check that needs the library that reads packages."""
    if not _looked("package reader", _package_reader).ok:
        return HostFinding(name, False, "not checked without the package reader", "Build the package reader first.")
    return _looked(name, look)


def _looked(name: str, look: Callable[[], HostFinding]) -> HostFinding:
    """Makes a check. What exportkit refuses in it is the finding."""
    try:
        return look()
    except ExportkitError as error:
        return HostFinding(name, False, error.message, error.hint)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _python() -> HostFinding:
    version = platform.python_version()
    ok = sys.version_info >= _numbers(PYTHONS[0])
    hint = None if ok else f"exportkit needs {PYTHONS[0]} or newer."
    return HostFinding("python", ok, f"{version} in {sys.prefix}", hint)


def _platform() -> HostFinding:
    system, machine = platform.system(), platform.machine()
    name = f"{system} {machine}, {' '.join(platform.libc_ver()) or 'unknown C library'}"
    ok = system == "Linux" and machine in ("x86_64", "aarch64")
    hint = "exportkit makes and loads packages on Linux only, on x86_64 and aarch64."
    return HostFinding("platform", ok, name, None if ok else hint)


def _torch() -> HostFinding:
    if importlib.util.find_spec("torch") is None:
        return HostFinding("torch", False, "not installed", _INSTALL_TORCH)
    import torch

    built = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    abi = "" if torch.compiled_with_cxx11_abi() else ", libstdc++'s ABI from before C++11"
    minor = ".".join(torch.__version__.split(".")[:2])
    lacks = f", {LACKS[minor]}" if minor in LACKS else ""
    if minor not in EXPORTING_TORCHES:
        lacks = ", which loads packages; export was not tested with it"
    detail = f"{torch.__version__}, {built}, {torch.get_num_threads()} threads{abi}{lacks}"
    ok = _numbers(minor) >= _numbers(OLDEST_TORCH)
    return HostFinding("torch", ok, detail, None if ok else _INSTALL_TORCH)


def _torch_patches() -> HostFinding:
    """Compares this torch with the table of what export replaces in it, which imports Inductor."""
    from exportkit.export.torch_patches.patch_table import PATCHES
    from exportkit.export.torch_patches.patched import is_needed, misfit

    needed = [patch for patch in PATCHES.values() if is_needed(patch)]
    if differs := [reason for patch in needed if (reason := misfit(patch)) is not None]:
        hint = f"Export replaces these. Export with torch {exporting_torches()}; any torch loads packages."
        return HostFinding("torch patches", False, f"this torch {'; '.join(differs)}", hint)
    names = ", ".join(sorted(patch.key for patch in needed))
    return HostFinding("torch patches", True, f"{len(needed)}, made while a model is exported: {names}")


def _libstdcxx() -> HostFinding:
    """Checks the libstdc++ of this process, which the libraries of packages use as well."""
    import torch  # noqa: F401  # loads libstdc++

    from exportkit.package.elf import defined_versions

    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/libstdc++.so" in line}
    if not mapped:
        hint = "Packages need the host's libstdc++. Install it (Debian: apt-get install libstdc++6)."
        return HostFinding("libstdc++", False, "torch did not load it: it was linked with another C++ library", hint)
    path = min(mapped)
    newest = defined_versions(Path(path), "GLIBCXX_")[-1:] or ["no version"]
    return HostFinding("libstdc++", True, f"GLIBCXX_{newest[0]}, {path}")


def _package_reader() -> HostFinding:
    from exportkit.package import core

    core.library()
    return HostFinding("package reader", True, str(core.LIBRARY))


def _signatures() -> HostFinding:
    """Checks libcrypto, which is opened only to check signatures."""
    library = "libcrypto.so.3"
    try:
        ctypes.CDLL(library)
    except OSError as error:
        hint = "Checking signatures needs OpenSSL 3 (Debian: apt-get install libssl3). Nothing else needs it."
        return HostFinding("signatures", False, f"cannot be checked: {error}", hint)
    signs = importlib.util.find_spec("cryptography") is not None
    can = "made and checked" if signs else "checked; to make them: pip install 'exportkit[sign]'"
    return HostFinding("signatures", True, f"{can}, {library}")


def _policies() -> HostFinding:
    """Checks this machine's policies on signatures. One that cannot be followed lets nothing load."""
    from exportkit.package.revocation import revocations_here
    from exportkit.package.trust import Trust

    by = Trust().demanded_by()
    lists = [
        f"{each.path} (sequence {each.sequence}) revokes keys: {each.keys}, packages: {each.packages}"
        for each in revocations_here()
    ]
    demanded = f"{by} requires a signature" if by else "none requires a signature"
    return HostFinding("policies", True, "; ".join([demanded, *lists]))


def _onnx() -> HostFinding:
    """Checks the optional packages that convert and run ONNX models."""
    from exportkit.errors import HostError
    from exportkit.onnx.onnx_session import import_onnxruntime

    try:
        found = [f"ONNX Runtime {import_onnxruntime().__version__}"]
        found += [f"{name} {metadata.version(name)}" for name in ("onnx", "onnxscript", "onnx-ir")]
    except (HostError, metadata.PackageNotFoundError) as error:
        reason = error.message if isinstance(error, HostError) else f"{error.name} is not installed"
        return HostFinding("ONNX", False, reason, "pip install 'exportkit[onnx]'. Only ONNX models need it.")
    return HostFinding("ONNX", True, ", ".join(found))


def _cpu() -> HostFinding:
    from exportkit.export.cpu_isas import cpu_isas_of
    from exportkit.runtime.targets import host_cpu_isa

    level, compiled = host_cpu_isa(), cpu_isas_of(platform.machine())
    detail = f"{level}, {os.cpu_count()} cores"
    hint = f"Packages are compiled for {' or '.join(compiled) or 'other machines'}, which this CPU does not have."
    return HostFinding("CPU", level in compiled, detail, None if level in compiled else hint)


def _cuda_device() -> HostFinding:
    import torch

    from exportkit.runtime.targets import driver_cuda

    driver = driver_cuda()
    knows = f"the driver supports CUDA {driver}" if driver else "there is no driver"
    if torch.version.cuda is None:
        hint = "If there is a GPU, install a CUDA build of torch from https://pytorch.org/get-started."
        return HostFinding("CUDA device", False, f"torch is a CPU build; {knows}", hint)
    if not torch.cuda.is_available():
        hint = "`nvidia-smi` shows the GPUs. The driver must support torch's CUDA version or a newer one."
        return HostFinding("CUDA device", False, f"torch (CUDA {torch.version.cuda}) sees no device; {knows}", hint)
    devices = [f"CUDA {torch.version.cuda}, {knows}"]
    newest = f" of CUDA {driver} and older" if driver else ""
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        natively = f"runs code for sm_{major}{minor}, sm_{major}{minor}a and older sm_{major}x natively"
        name = torch.cuda.get_device_name(index)
        devices.append(f"cuda:{index} {name} ({natively}, other older code by PTX{newest})")
    return HostFinding("CUDA device", True, ", ".join(devices))


def _worker_processes() -> HostFinding:
    """Tries in this process what `exportkit.load(..., isolate=True)` needs."""
    import torch

    from exportkit.child.process import interpreter
    from exportkit.errors import HostError
    from exportkit.runtime.isolated_messages import Ran
    from exportkit.runtime.tensor_socket import TensorSocket

    name, size = "worker processes", 64 << 20
    try:
        interpreter()
    except HostError as error:
        return HostFinding(name, False, error.message, "Run exportkit with Python itself.")
    ours, theirs = socket.socketpair()
    sender, receiver = TensorSocket[Ran](ours, Ran), TensorSocket[Ran](theirs, Ran)
    try:
        sender.send(Ran(), [torch.ones(size, dtype=torch.uint8)])
        receiver.receive()
    except OSError as error:
        hint = "Workers share tensors in anonymous memory (memfd). Check the memory limit, `ulimit -n` and `ulimit -f`."
        return HostFinding(name, False, f"{size >> 20} MB of memory cannot be shared: {error}", hint)
    finally:
        sender.close()
        receiver.close()
    return HostFinding(name, True, "tensors are shared in anonymous memory, without /dev/shm")


def _compiler() -> HostFinding:
    """Finds the C++ compiler that `export` would use and checks that its output loads with torch."""
    from exportkit.export.compile.usable_compiler import objection, usable_compiler

    path = usable_compiler()
    detail = f"{_output([path, '--version']).partition(chr(10))[0]} at {path}"
    given = shutil.which(os.environ.get("CXX", ""))
    if given and (reason := objection(given)):
        detail += f"; $CXX is ignored, {reason}"
    detail += ", with ccache" if shutil.which("ccache") else "; install ccache to compile no source twice"
    return HostFinding("compiler", True, detail)


def _nvcc() -> HostFinding:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = (shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None) or shutil.which("nvcc")
    if path is None:
        return HostFinding("nvcc", False, "not on PATH, and no CUDA_HOME", "Only building CUDA operators needs it.")
    return HostFinding("nvcc", True, f"{_output([path, '--version']).strip().splitlines()[-1]} at {path}")


def _temporary_files() -> HostFinding:
    """Checks the temporary directory, where the compiler works and probed libraries are loaded."""
    folder = tempfile.gettempdir()
    status = os.statvfs(folder)
    if status.f_flag & os.ST_NOEXEC:
        hint = "Compiled code is loaded from there. Set TMPDIR to a directory that allows executable code."
        return HostFinding("temporary files", False, f"{folder} is mounted noexec", hint)
    free = status.f_bavail * status.f_frsize
    if free < 1 << 30:
        return HostFinding(
            "temporary files", False, f"{folder} has {free / 1e6:.0f} MB free", "Compiling needs about 1 GB."
        )
    return HostFinding("temporary files", True, f"{folder}, {free / 1e9:.0f} GB free")


def _cache() -> HostFinding:
    from exportkit.runtime.cache import cache_directory

    folder = cache_directory()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    files = [path for path in folder.rglob("*") if path.is_file()]
    detail = f"{folder}, {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.0f} MB"
    if reason := _unusable(folder, existing):
        existing = Path(tempfile.gettempdir())
        detail = f"{reason}: every process unpacks packages into {existing}; set EXPORTKIT_CACHE to change that"
    if os.statvfs(existing).f_flag & os.ST_NOEXEC:
        hint = "Packages' code is loaded from there. Set EXPORTKIT_CACHE to a directory that allows executable code."
        return HostFinding("cache", False, f"{existing} is mounted noexec", hint)
    return HostFinding("cache", True, detail)


def _unusable(folder: Path, existing: Path) -> str | None:
    """Says why the cache cannot be used, or returns None. `existing` is its lowest existing folder."""
    from exportkit.errors import CacheError
    from exportkit.runtime.cache.prune import cache_items

    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{folder} is not writable"
    try:
        cache_items()
    except CacheError as error:
        return error.message
    return None


def _runtime() -> HostFinding:
    from exportkit.runtime.native import built_for, library_path, why_unusable

    if reason := why_unusable():
        hint = (
            "Packages run all the same, with torch's own binding, which holds the GIL and makes no CUDA graphs. "
            "`make build` builds the runtime for the installed torch."
        )
        return HostFinding("C++ runtime", False, reason, hint)
    return HostFinding("C++ runtime", True, f"{library_path()}, built for torch {', '.join(built_for())}")


def _cuda_graphs() -> HostFinding:
    from exportkit.runtime.native import why_no_graphs

    if reason := why_no_graphs():
        hint = "`make build` builds the C++ runtime with them where torch and its headers are for CUDA."
        return HostFinding("CUDA graphs", False, reason, hint)
    return HostFinding("CUDA graphs", True, "exportkit.load(..., cuda_graphs=True)")


def _has_libraries(namespace: str) -> bool:
    """Whether operators are built: Triton's kernels are compiled into packages, and have no library."""
    try:
        return bool(libraries_of(namespace))
    except ExportkitError:
        return True  # the finding says why


def _library(namespace: str, device: str) -> HostFinding:
    from exportkit.package.describe_library import describe_library

    name, libraries = f"{namespace} on {device.upper()}", libraries_of(namespace)
    path = libraries.get(device, libraries.get("cpu"))  # one library may have the kernels of every device
    library = describe_library(path) if path is not None else None
    if library is None or (device not in libraries and not {device, "any"} & {*library.kernels}):
        hint = "The package that brings these operators builds them."
        return HostFinding(name, False, f"not built for {device.upper()}, or not named by its module", hint)
    count = f"{len(library.defines)} operators" if library.defines else "kernels"
    return HostFinding(
        name, True, f"{count}, torch {library.needs_torch} or newer, {library.record.rpartition('/')[2]}"
    )


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
