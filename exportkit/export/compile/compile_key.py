"""The digest of all that compiled code depends on: the program, options, torch, the compilers and the machine.

An export whose digest is known takes the code from the cache (`compiled_cache`). What cannot be written down as a text
is compiled each time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch.fx.experimental import _config as size_config

from exportkit import __version__
from exportkit.export.compile.program_fingerprint import UnknownPartError, encoded, program_fingerprint
from exportkit.precision import Float32Precision

# Variables with these beginnings, and these, may reach Inductor, the compilers or the linker.
_PREFIXES = (
    *("AOT", "ATEN", "CUDA", "DNNL", "GCC_", "INDUCTOR", "MKL", "NVCC", "ONEDNN", "PTXAS", "PYTORCH", "TORCH"),
    "TRITON",
)
_VARIABLES = frozenset(
    [
        *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
        *("LIBRARY_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LD_RUN_PATH", "COMPILER_PATH", "SOURCE_DATE_EPOCH"),
    ]
)
# These say where something is kept or written down, or how many work.
_NOT_CODE = re.compile(r"(_CACHE_DIR|_DUMP_DIR|_HOME_DIR|^TORCH_HOME|^TORCH_LOGS.*|^TORCH_TRACE|_COMPILE_THREADS)$")
_UNUSED_OPTIONS = re.compile(
    r"(^aot_inductor\.output_path|cutlass_dir|^compile_threads|^worker_start_method|log_?path|^_cache_config.*|^_save.*)$"
)
# With these, Inductor writes lines of the model's source into the code, which are not in the fingerprint.
WITH_SOURCE_LINES = ("cpp.enable_kernel_profile", "aot_inductor.enable_line_tables", "trace.enabled")
# torch's folders whose sources decide what the code is; the headers are what it is compiled with.
_TORCH_SOURCES = (
    *("_decomp", "_export", "_functorch", "_higher_order_ops", "_inductor", "_library", "_prims", "_prims_common"),
    *("_refs", "_subclasses", "export", "fx", "utils/_sympy", "include/torch/csrc/inductor"),
)
_TORCH_LIBRARIES = ("libtorch_cpu.so", "libtorch_python.so", "libtorch_cuda.so", "libc10.so")
OWN_SOURCES = Path(__file__).parents[2]


def compile_key(
    program: torch.export.ExportedProgram,
    device: torch.device,
    options: Mapping[str, Any],
    *,
    weights: Mapping[str, str] | None,
    **more: Any,
) -> str:
    """Returns the digest of what the code of a program depends on, in the contexts that it is compiled in.

    Without the digests of the weights, their values count. `more` has what else decides, by name.

    Raises:
        UnknownPartError: Something has no text, such as a function among Inductor's options. The message names it.
    """
    told = {**config.get_config_copy(), **options}
    if told.get("aot_inductor.custom_op_libs"):
        raise UnknownPartError("libraries that are linked to it")
    if any(told.get(name) for name in WITH_SOURCE_LINES):
        raise UnknownPartError("places in the source of the model")
    told = {name: value for name, value in told.items() if not _UNUSED_OPTIONS.search(name)}
    parts = [
        program_fingerprint(program, values=weights is None),
        f"weights {encoded(weights)}",
        *(f"option {name} {encoded(value)}" for name, value in sorted(told.items())),
        *(f"more {name} {encoded(value)}" for name, value in sorted(more.items())),
        *_settings(),
        *_environment(),
        *_machine(device),
        *_software(),
        *_compilers(str(told["cpp.cxx"][-1]), device),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _settings() -> Iterator[str]:
    """Yields what is set in this process besides Inductor's options."""
    for name, settings in (("functorch", functorch_config), ("sizes", size_config)):
        values = settings.get_config_copy()
        yield f"{name} {encoded(dict(sorted(values.items())))}"
    backends = torch.backends
    values = {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": vars(torch.utils.deterministic).get("fill_uninitialized_memory"),
        "dtype": torch.get_default_dtype(),
        "precision": msgspec.structs.asdict(Float32Precision.current()),
        "gradients": torch.is_grad_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "oneDNN": (backends.mkldnn.is_available(), torch._C._get_mkldnn_enabled()),
        "cuDNN": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "sums": [
            getattr(backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction") for dtype in ("fp16", "bf16")
        ],
        "attention": [getattr(backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "math", "mem_efficient")],
    }
    yield f"settings {encoded(values)}"


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if (name.startswith(_PREFIXES) or name in _VARIABLES) and not _NOT_CODE.search(name):
            yield f"variable {name}={value}"


def _machine(device: torch.device) -> Iterator[str]:
    yield f"machine {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_flags()}"
    yield f"device {device.type}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        named = [
            *("name", "major", "minor", "multi_processor_count", "warp_size", "regs_per_multiprocessor"),
            *("shared_memory_per_block", "shared_memory_per_block_optin", "L2_cache_size"),
        ]
        yield f"gpu {[getattr(properties, name, None) for name in named]}"


@functools.cache
def _cpu_flags() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return " ".join(sorted(flags[1].split())) if flags else ""


@functools.cache
def _software() -> tuple[str, ...]:
    """Returns the versions of Python, torch and exportkit, and the states or digests of their sources."""
    sources = [f"{part}/**/*.{kind}" for part in _TORCH_SOURCES for kind in ("py", "h")]
    states = _states(Path(torch.__file__).parent, "*.py", *sources, *(f"lib/{name}" for name in _TORCH_LIBRARIES))
    own = hashlib.sha256()
    for path in sorted([*OWN_SOURCES.glob("*.py"), *(OWN_SOURCES / "export").rglob("*.py")]):
        own.update(f"{path.relative_to(OWN_SOURCES)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return (
        f"python {sys.version}",
        f"torch {torch.__version__} {torch.version.git_version} {torch.version.cuda} {states}",
        f"exportkit {__version__} {own.hexdigest()}",
    )


def _compilers(cxx: str, device: torch.device) -> Iterator[str]:
    yield f"compiler {_tool(cxx)}"
    yield f"assembler {_tool('as')}"
    yield f"linker {_tool('ld')}"
    if device.type != "cuda":
        return
    yield f"objcopy {_tool('objcopy')}"
    found = importlib.util.find_spec("triton")
    if found is not None and found.origin is not None:
        import triton

        states = _states(Path(found.origin).parent, "backends/**/bin/*", "_C/*.so", "**/*.py")
        yield f"triton {triton.__version__} {states}"
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for tool in ("nvcc", "ptxas", "fatbinary"):
        yield f"{tool} {_tool(shutil.which(tool) or f'{home}/bin/{tool}')}"


@functools.cache
def _tool(name: str) -> str:
    """Returns a program's path, its file's state, and what it says of its version; empty if there is none."""
    path = shutil.which(name)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except OSError:
        return path
    real = Path(path).resolve()
    return f"{path} {_state(real)} {hashlib.sha256(done.stdout).hexdigest()}"


def _states(folder: Path, *patterns: str) -> str:
    """Returns the digest of the names, sizes and times of files."""
    found = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return hashlib.sha256("\n".join(map(_state, found)).encode()).hexdigest()


def _state(path: Path) -> str:
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"
