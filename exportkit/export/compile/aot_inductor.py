"""Compiles an ExportedProgram with AOTInductor: one target of a package."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch._inductor import config

from exportkit.errors import CompilerError
from exportkit.export.compile.compile_key import compile_key
from exportkit.export.compile.compile_plan import CompilePlan
from exportkit.export.compile.compiled_cache import Code, find_code, keep_code
from exportkit.export.compile.program_fingerprint import UnknownPartError
from exportkit.export.compile.program_weights import ProgramWeights
from exportkit.export.compile.toolchain import compiling_for, torch_minor
from exportkit.export.compile.usable_compiler import usable_compiler
from exportkit.export.trace.traced import Traced
from exportkit.libraries import TORCH_NAMESPACES, host_platform, schemas_of
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.cuda_code import cuda_architectures, strictest
from exportkit.package.elf import oldest_torch, read_elf
from exportkit.package.manifest import Operator, Target, code_folder
from exportkit.progress import Progress
from exportkit.spec import FORWARD
from exportkit.support import OLDEST_TORCH

_NUMBERED = ("as_scalar_type", "as_layout", "as_memory_format")
_NUMBERED_SINCE = "2.12"
"""torch 2.11 takes the numbers that torch.export has for dtypes for its own: int64 is float16 to an operator."""

_SCATTER_LOSES_ITS_DTYPE = ("2.11", "2.12")
"""Where a number is scattered into a constant, Inductor of these writes int64 for 1: pytorch/pytorch#186481."""


class Compiled(NamedTuple):
    """A target, its files or contents by name in the archive, and the custom operators that it calls."""

    target: Target
    records: Mapping[str, bytes | Path]
    operators: tuple[Operator, ...]


def compile_methods(
    traced: Traced,
    folder: Path,
    plan: CompilePlan,
    cpu_isa: str | None,
    *,
    weights: ProgramWeights | None,
    progress: Progress,
) -> Compiled:
    """Compiles the methods of a traced model for one instruction set.

    The folder is made if there is none. Without `weights`, they stay inside of the code.

    Raises:
        CompilerError: No compiler can be used.
        ExportError: AOTInductor refused a program, its code does not compile, or a weight cannot stay outside of it.
    """
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()  # of what recording left: Inductor tries kernels on copies of large weights
    name, tf32 = _target_name(plan.device, cpu_isa), traced.provenance.tf32
    ptx = plan.device.type == "cuda" and plan.cuda_arch == "native+ptx" and _can_add_ptx(plan.device, progress)
    files: list[Path] = []
    constants: dict[str, dict[str, str]] = {}
    records: dict[str, bytes | Path] = {}
    operators: dict[str, Operator] = {}
    needs = [OLDEST_TORCH]
    for method in traced.methods:
        of = "" if method.name == FORWARD else f"{method.name} "
        progress(f"compiling {of}for {_target_text(plan.device, cpu_isa)} with {_compiler(plan)[-1]}")
        own = folder / method.name
        own.mkdir(parents=True, exist_ok=True)
        code = _code(method.program, own, plan, cpu_isa, weights, ptx=ptx, tf32=tf32, progress=progress)
        constants[method.name] = weights.take(code.constants, plan.device) if weights else {}
        found, called, oldest = _records(code.files, code_folder(name, method.name))
        files += code.files
        needs.append(oldest)
        records |= found
        operators |= {operator.name: operator for operator in called}
    target = msgspec.structs.replace(_target(plan.device, cpu_isa, ptx, files, needs), constants=constants)
    return Compiled(target, records, tuple(operators[each] for each in sorted(operators)))


def _compiler(plan: CompilePlan) -> Sequence[str]:
    return plan.inductor_config.get("cpp.cxx") or (usable_compiler(),)


def _code(
    program: torch.export.ExportedProgram,
    folder: Path,
    plan: CompilePlan,
    cpu_isa: str | None,
    weights: ProgramWeights | None,
    *,
    ptx: bool,
    tf32: bool,
    progress: Progress,
) -> Code:
    """Compiles a method, or takes its code from the cache."""
    device = plan.device
    with compiling_for(cpu_isa) as options:
        options |= weights.options if weights else {}
        options |= {
            "cpp.cxx": _compiler(plan),
            "cpp.dynamic_threads": True,  # otherwise the code uses this machine's number of threads everywhere
            # Compiling a precompiled header takes more than twice the time that a model saves by it, leaves 280 MB in
            # the temporary folder, and needs the openssl program (docs/adr/0079-fast-exports.md).
            "aot_inductor.precompile_headers": False,
            "aot_inductor.package": True,
            "aot_inductor.output_path": str(folder),
            "aot_inductor.model_name_for_generated_files": "model",
            "aot_inductor.metadata": {},  # AOTInductor writes into it: not into that of the next model
            # An operator library may name functions of its own here, which code calls past the dispatcher. A loader
            # opens libraries so that nothing else finds their functions.
            "aot_inductor.custom_ops_to_c_shims": {},
        }
        if hasattr(config.aot_inductor, "enable_line_tables"):  # not in torch 2.11, which makes none
            options["aot_inductor.enable_line_tables"] = False
        if torch_minor() in _SCATTER_LOSES_ITS_DTYPE:
            options["optimize_scatter_upon_const_tensor"] = False
        if device.type == "cuda":
            # ld and objcopy put the kernels into the library. Without these tools the kernels are files beside it.
            options["aot_inductor.embed_kernel_binary"] = bool(shutil.which("ld") and shutil.which("objcopy"))
            options["aot_inductor.emit_multi_arch_kernel"] = ptx
            # Otherwise Inductor times two forms of each kernel, at the example's sizes and on a GPU that may be busy.
            # Its choice costs other sizes up to a tenth of a call (docs/performance.md).
            options["triton.autotune_pointwise"] = False
        options |= {**plan.inductor_config, **plan.remembered}
        key = None
        if plan.cache:
            digests = weights.digests if weights else None
            decides: dict[str, Any] = {"isa": cpu_isa, "eager_kernels": plan.eager_kernels, "tf32": tf32}
            try:
                key = compile_key(program, device, options, weights=digests, **decides)
            except UnknownPartError as error:
                progress(f"the code is not kept in the cache: it depends on {error}")
        code = find_code(key, folder, program, device) if key else None
        if code is not None:
            progress("taking the code from the cache")
        else:
            # Imported late: these take seconds.
            from exportkit.export.compile.compile_failure import UncompiledError
            from exportkit.export.compile.run_inductor import run_inductor

            left = tuple(plan.eager_kernels)
            while code is None:
                options |= replace(plan, eager_kernels=left).remembered
                try:
                    with weights.outside() if weights else nullcontext():
                        code = run_inductor(program, device, options, left_to_eager=left, keep=plan.cache, tf32=tf32)
                except UncompiledError as failed:
                    left = failed.left_to_eager(left)
                    progress(f"compiling with eager's kernel of {failed.at}: {failed}")
            if key and (reason := keep_code(key, code, weights)):
                progress(f"the code is not kept in the cache: {reason}")
    return code


def _target(
    device: torch.device, cpu_isa: str | None, ptx: bool, files: Sequence[Path], needs: Sequence[str]
) -> Target:
    """Describes the compiled code of all methods. Which GPUs run it is said by the code, not by the device.

    Raises:
        CompilerError: A library would crash when it is loaded.
    """
    elves = [read_elf(file) for file in files if file.suffix == ".so"]
    if any(elf.static_libstdcxx for elf in elves):
        raise CompilerError(
            "the compiled model contains a copy of libstdc++, so it would crash in std::regex when it is loaded",
            hint="Use a compiler that links it dynamically: CXX=/usr/bin/g++.",
        )
    architecture = _architecture(device) if device.type == "cuda" else None
    return Target(
        name=_target_name(device, cpu_isa),
        device="cuda" if architecture else "cpu",
        platform=host_platform(),
        cpu_isa=cpu_isa,
        cuda_architecture=architecture and strictest(cuda_architectures(files), architecture),
        cuda_ptx=ptx,
        needs_torch=max([*needs, *(oldest_torch(elf.torch_symbols) or torch_minor() for elf in elves)], key=_version),
        built_with_torch=str(torch.__version__),
        built_with_cuda=torch.version.cuda if architecture else None,
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _records(files: Sequence[Path], folder: str) -> tuple[dict[str, bytes | Path], tuple[Operator, ...], str]:
    """Returns the files of a folder of compiled code, the operators it calls, and the oldest torch that calls them."""
    folder = f"{AOTINDUCTOR_DIR}/{folder}"
    records: dict[str, bytes | Path] = {}
    called: set[str] = set()
    oldest = OLDEST_TORCH
    for file in files:
        if file.name.endswith(".wrapper.cpp"):
            # torch 2.11 finds the model by this name. The source is left out: it is large and may be confidential.
            records[f"{folder}/{file.name}"] = b""
        elif file.suffix != ".cpp":
            records[f"{folder}/{file.name}"] = file
        if file.name.endswith(".wrapper.json"):
            nodes = json.loads(file.read_text())
            called |= called_operators(nodes)
            oldest = max(oldest, torch_that_calls(nodes), key=_version)
    # They may be others than the traced program calls: an operator without kernels of its own calls some.
    operators = tuple(Operator(name=name, schema=schema) for name, schema in schemas_of(called).items())
    return records, operators, oldest


def torch_that_calls(nodes: Mapping[str, Any]) -> str:
    """Returns the oldest torch that calls the operators of AOTInductor's list with the arguments written there."""
    calls = (node.get("node", node) for node in nodes.get("nodes", ()))
    numbered = any(kind in given["arg"] for call in calls for given in call.get("inputs", ()) for kind in _NUMBERED)
    return _NUMBERED_SINCE if numbered else OLDEST_TORCH


def called_operators(nodes: Mapping[str, Any]) -> set[str]:
    """Finds the custom operators in AOTInductor's list of the operators that it calls through the dispatcher."""
    called = set()
    for node in nodes.get("nodes", ()):
        # "myops::scale", or "torch.ops.aten.foo.default" in the notation of torch.export's schema.
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
    """Tells whether PTX would run on newer GPUs, and can be compiled."""
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 9:
        # Triton and torch compile for sm_90a and its successors. Only that architecture runs such PTX.
        progress(f"no PTX: code for sm_{major}{minor} uses instructions that only this architecture has")
        return False
    home = os.environ.get("CUDA_HOME", "")
    if not any(shutil.which(tool) for tool in ("nvcc", os.environ.get("CUDACXX", ""), f"{home}/bin/nvcc") if tool):
        progress("no PTX: it needs nvcc, which is neither on the path nor in $CUDA_HOME/bin")
        return False
    return True


def _architecture(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _target_name(device: torch.device, cpu_isa: str | None) -> str:
    """Names a target. The targets of one package have different names: a GPU may be in hosts of two platforms."""
    if device.type == "cpu":
        return re.sub(r"\W", "_", f"cpu_{cpu_isa or 'baseline'}")
    machine = host_platform().partition("-")[2]
    return re.sub(r"\W", "_", f"cuda_{_architecture(device)}" + (f"_{machine}" if machine != "x86_64" else ""))


def _target_text(device: torch.device, cpu_isa: str | None) -> str:
    return f"cuda ({_architecture(device)})" if device.type == "cuda" else f"cpu ({cpu_isa or 'baseline'})"
