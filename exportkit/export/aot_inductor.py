"""Compiles an ExportedProgram with AOTInductor: one target of a package."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch._inductor import config, exc
from torch.utils._pytree import tree_structure

from exportkit.errors import CompilerError, ExportError, UsageError
from exportkit.export.cases import eager_mode
from exportkit.export.preflight import TORCH_NAMESPACES
from exportkit.export.program_weights import ProgramWeights
from exportkit.export.toolchain import compiling_for, last_lines, torch_minor, usable_compiler
from exportkit.export.trace import Progress, Traced
from exportkit.libraries import host_platform
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.elf import oldest_torch, read_elf
from exportkit.package.manifest import Operator, Target

# Options that decide what files there are and where weights go; the format depends on them.
_RESERVED = (
    *("aot_inductor.package", "aot_inductor.package_cpp_only", "aot_inductor.output_path"),
    *("aot_inductor.model_name_for_generated_files", "aot_inductor.package_constants_in_so"),
    *("aot_inductor.package_constants_on_disk_format", "aot_inductor.link_libtorch", "cpp.march", "cpp.simdlen"),
    "aot_inductor.cross_target_platform",
)
# These compute with the weights when the code is compiled, or decide whether that is done.
_FOR_EMBEDDED_WEIGHTS = (
    *("freezing", "always_keep_tensor_constants", "joint_graph_constant_folding"),
    "aot_inductor.use_runtime_constant_folding",
)


@dataclass(frozen=True)
class Compiled:
    """A target with its files.

    Attributes:
        target: For the manifest.
        records: Name in the archive to file or content.
        operators: The custom operators that the code calls through the dispatcher.
    """

    target: Target
    records: Mapping[str, bytes | Path]
    operators: tuple[Operator, ...]


def compile_program(
    traced: Traced,
    folder: Path,
    *,
    device: torch.device,
    cpu_isa: str | None,
    cuda_arch: Literal["native", "native+ptx"],
    inductor_config: Mapping[str, Any],
    weights: ProgramWeights | None,
    progress: Progress,
) -> Compiled:
    """Compiles a traced model for one device.

    Args:
        traced: On that device.
        folder: For the files; made if it is missing.
        device: cpu or cuda.
        cpu_isa: What CPU code may use, the host code of a CUDA target included.
        cuda_arch: Whether PTX goes along.
        inductor_config: Checked options (see `read_inductor_config`) that override ours.
        weights: The program's, which stay outside of the code; None leaves them inside.
        progress: Told what is about to be done.

    Raises:
        CompilerError: No usable compiler, or it refused the generated code.
        ExportError: AOTInductor refused the program, or a weight cannot stay outside.
    """
    folder.mkdir(exist_ok=True)
    compiler = inductor_config.get("cpp.cxx") or (usable_compiler(),)
    ptx = device.type == "cuda" and cuda_arch == "native+ptx" and _can_add_ptx(device, progress)
    progress(f"compiling for {_target_text(device, cpu_isa)} with {compiler[-1]}")
    with compiling_for(cpu_isa) as options, weights.outside() if weights else nullcontext(dict[str, Any]()) as outside:
        options |= outside
        options |= {
            "cpp.cxx": compiler,
            "cpp.dynamic_threads": True,  # else the number of threads is that of this machine
            "aot_inductor.package": True,
            "aot_inductor.output_path": str(folder),
            "aot_inductor.model_name_for_generated_files": "model",
        }
        if hasattr(config.aot_inductor, "enable_line_tables"):  # not in torch 2.11, which makes none
            options["aot_inductor.enable_line_tables"] = False
        if device.type == "cuda":
            # ld and objcopy put the kernels into the library; without them they lie beside it, which loads as well.
            options["aot_inductor.embed_kernel_binary"] = bool(shutil.which("ld") and shutil.which("objcopy"))
            options["aot_inductor.emit_multi_arch_kernel"] = ptx
        files, constants = _compile(traced.program, {**options, **inductor_config})
    target = _target(device, cpu_isa, ptx, _library(files))
    if weights:
        target = msgspec.structs.replace(target, constants=weights.take(constants, device))
    records, operators = _records(files, target.name, traced)
    return Compiled(target, records, operators)


def read_inductor_config(given: Mapping[str, Any], *, embed_weights: bool = False) -> dict[str, Any]:
    """Options of torch._inductor.config with their values as Python has them; text is read as JSON where it is some.

    Raises:
        UsageError: There is no such option, or it is one the format depends on, or weights that stay outside.
    """
    known = config.get_config_copy()
    options = {}
    for name, value in given.items():
        if name in _RESERVED:
            raise UsageError(f"--inductor-config {name}: exportkit sets this one; a package depends on it")
        if name in _FOR_EMBEDDED_WEIGHTS and not embed_weights:
            raise UsageError(
                f"--inductor-config {name}: weights that can be swapped depend on this one",
                hint="--embed-weights leaves them inside the compiled code, and the choice to you.",
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            raise UsageError(
                f"torch._inductor.config has no option {name!r}",
                hint=f"Did you mean {', '.join(close)}?" if close else None,
            )
        options[name] = _read_value(value)
    if isinstance(compiler := options.get("cpp.cxx"), str):
        options["cpp.cxx"] = (compiler,)
    return options


def _read_value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower() if value in ("True", "False") else value)
    except json.JSONDecodeError:
        return None if value == "None" else value


def _compile(
    program: torch.export.ExportedProgram, options: dict[str, Any]
) -> tuple[list[Path], Mapping[str, torch.Tensor]]:
    """The files, and the constants that are not in them."""
    args, kwargs = program.example_inputs
    try:
        with eager_mode(), warnings.catch_warnings():
            # torch 2.13 copies its own deprecated LeafSpec.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            module = returning_tensors(program.module(check_guards=False))
            files = torch._inductor.aot_compile(module, args, kwargs, options=options)
    except Exception as error:
        # Inductor raises its own classes, wrapped or not, and whatever a custom operator's fake kernel raises.
        cause = getattr(error, "inner_exception", None) or error
        if isinstance(cause, (exc.CppCompileError, exc.InvalidCxxCompiler)):
            raise CompilerError(
                f"the C++ compiler refused the generated code: {last_lines(str(cause), 8)}",
                hint="exportkit doctor says which compiler is used; another one can be named with CXX.",
            ) from error
        raise ExportError(
            f"AOTInductor could not compile the program: {type(cause).__name__}: {str(cause).strip()[:4000]}",
            hint="It traces, so `--format program` works; --inductor-config may avoid the part that fails.",
        ) from error
    paths: list[Path] = []
    constants: dict[str, torch.Tensor] = {}
    for file in files:  # type: ignore[union-attr]  # with aot_inductor.package it is a list
        if isinstance(file, dict):  # weights that stay outside: name to tensor and what is known of its storage
            constants |= {name: tensor for name, (tensor, _) in file.items()}
        else:
            paths.append(Path(str(file)))
    return paths, constants


def returning_tensors(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A program's module without the constants among its outputs, changed in place.

    AOTInductor returns a tensor for None and for every number; the manifest has the constants and where they belong.
    """
    output = module.graph.output_node()
    returned: Any = output.args[0]
    tensors = tuple(value for value in returned if isinstance(value, torch.fx.Node))
    if len(tensors) < len(returned):
        output.args = (tensors,)
        codegen: Any = module.graph._codegen
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=tree_structure(tensors))
        module.recompile()
    return module


def _library(files: list[Path]) -> Path:
    return next(file for file in files if file.suffix == ".so")


def _target(device: torch.device, cpu_isa: str | None, ptx: bool, library: Path) -> Target:
    """What the compiled library is, from what it says of itself where it can.

    Raises:
        CompilerError: It would not load.
    """
    elf = read_elf(library)
    if elf.static_libstdcxx:
        raise CompilerError(
            "the compiled model holds a copy of libstdc++, and would crash in std::regex when it is loaded",
            hint="Name a compiler that links it dynamically: CXX=/usr/bin/g++.",
        )
    architecture = None
    if device.type == "cuda":
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return Target(
        name=f"cuda_{architecture}" if architecture else f"cpu_{(cpu_isa or 'baseline').replace('-', '_')}",
        device="cuda" if architecture else "cpu",
        platform=host_platform(),
        cpu_isa=cpu_isa,
        cuda_architecture=architecture,
        cuda_ptx=ptx,
        needs_torch=oldest_torch(elf.torch_symbols) or torch_minor(),
        built_with_torch=str(torch.__version__),
        built_with_cuda=torch.version.cuda if architecture else None,
    )


def _records(files: list[Path], target: str, traced: Traced) -> tuple[dict[str, bytes | Path], tuple[Operator, ...]]:
    """The files that travel, and the operators that the code calls."""
    folder = f"{AOTINDUCTOR_DIR}/{target}"
    records: dict[str, bytes | Path] = {}
    called: set[str] = set()
    for file in files:
        if file.name.endswith(".wrapper.cpp"):
            # torch 2.11 finds the model by this name; nobody reads the source, which is large and may be confidential.
            records[f"{folder}/{file.name}"] = b""
        elif file.suffix != ".cpp":
            records[f"{folder}/{file.name}"] = file
        if file.name.endswith(".wrapper.json"):
            called |= called_operators(json.loads(file.read_text()))
    operators = {operator.name: operator for operator in traced.operators}
    if unknown := called - operators.keys():
        raise ExportError(f"the compiled code calls {', '.join(sorted(unknown))}, which the traced program does not")
    return records, tuple(operators[name] for name in sorted(called))


def called_operators(nodes: Mapping[str, Any]) -> set[str]:
    """The custom operators in AOTInductor's list of what it calls through the dispatcher."""
    called = set()
    for node in nodes.get("nodes", ()):
        # "arr_coc::compute_entropy", or "torch.ops.aten.foo.default" in the notation of torch.export's schema.
        name = node.get("target") or node.get("node", {}).get("target", "")
        name = _dispatcher_name(name)
        if name.partition("::")[0] not in TORCH_NAMESPACES:
            called.add(name)
    return called


def _dispatcher_name(target: str) -> str:
    if "::" in target:
        return target.removesuffix(".default")
    namespace, name, overload = target.removeprefix("torch.ops.").split(".")
    return f"{namespace}::{name}" if overload == "default" else f"{namespace}::{name}.{overload}"


def _can_add_ptx(device: torch.device, progress: Progress) -> bool:
    """Whether PTX would serve newer GPUs, and can be made."""
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 9:
        # Triton and torch compile for sm_90a and the like, whose PTX no other architecture takes.
        progress(f"no PTX: code for sm_{major}{minor} uses instructions of that architecture alone")
        return False
    home = os.environ.get("CUDA_HOME", "")
    if not any(shutil.which(tool) for tool in ("nvcc", os.environ.get("CUDACXX", ""), f"{home}/bin/nvcc") if tool):
        progress("no PTX: it takes nvcc, which is neither on the path nor in $CUDA_HOME/bin")
        return False
    return True


def _target_text(device: torch.device, cpu_isa: str | None) -> str:
    if device.type == "cuda":
        return "cuda (sm_{}{})".format(*torch.cuda.get_device_capability(device))
    return f"cpu ({cpu_isa or 'baseline'})"
