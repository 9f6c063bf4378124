"""What is compiled on a machine, and the options of Inductor that are given for it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch._inductor import config

from exportkit.errors import UsageError
from exportkit.export.compile.eager_kernels import read_eager_kernels
from exportkit.export.compile.usable_compiler import usable_compiler
from exportkit.export.cpu_isas import check_cpu_isa, default_cpu_isa
from exportkit.export.export_options import CompileOptions
from exportkit.package.compiled_with import COMPILED_WITH, GivenOptions

# These decide which files exist and where the weights are. The format depends on them.
_RESERVED = (
    *("aot_inductor.package", "aot_inductor.package_cpp_only", "aot_inductor.output_path"),
    *("aot_inductor.model_name_for_generated_files", "aot_inductor.package_constants_in_so"),
    *("aot_inductor.package_constants_on_disk_format", "aot_inductor.link_libtorch", "cpp.march", "cpp.simdlen"),
    *("aot_inductor.cross_target_platform", "cpp.dynamic_threads"),
)
# The only choice of a vector's length: the target's instruction set has another one.
WITHOUT_VECTORS = ("cpp.simdlen", 1)
# These compute with the weights at compile time, or decide whether Inductor does.
_FOR_EMBEDDED_WEIGHTS = (
    *("freezing", "always_keep_tensor_constants", "joint_graph_constant_folding"),
    "aot_inductor.use_runtime_constant_folding",
)


@dataclass(frozen=True, kw_only=True)
class CompilePlan(CompileOptions):
    """Options that were checked and completed for a device of this machine, on which the model is traced."""

    device: torch.device

    @classmethod
    def of(cls, options: CompileOptions, device: torch.device) -> Self:
        """Plans what the options ask for, and checks that it can be compiled here.

        Raises:
            UsageError: An option is unknown, or does not fit this machine or the device.
            CompilerError: This machine has no usable C++ compiler.
        """
        isas = tuple(dict.fromkeys(options.cpu_isas)) or (default_cpu_isa(),)
        for isa in isas:
            check_cpu_isa(isa)
        inductor_config = read_inductor_config(options.inductor_config, embed_weights=options.embed_weights)
        if device.type != "cpu" and len(isas) > 1:
            raise UsageError(
                f"{' and '.join(map(str, isas))} were given for device cuda",
                hint="Give one CPU instruction set for a CUDA target.",
            )
        if "cpp.cxx" not in inductor_config:
            usable_compiler()  # checked first, because tracing takes minutes
        checked = {
            "cpu_isas": isas,
            "inductor_config": inductor_config,
            "eager_kernels": read_eager_kernels(options.eager_kernels),
        }
        return cls(device=device, **{**vars(options), **checked})

    @property
    def remembered(self) -> dict[str, dict[str, str]]:
        """The option of Inductor that writes what was given into the metadata of the code."""
        if not (self.inductor_config or self.eager_kernels):
            return {}
        given = GivenOptions(self.inductor_config, tuple(self.eager_kernels)).encoded()
        others = self.inductor_config.get("aot_inductor.metadata", {})
        return {"aot_inductor.metadata": {**others, COMPILED_WITH: given}}


def read_inductor_config(given: Mapping[str, Any], *, embed_weights: bool = False) -> dict[str, Any]:
    """Reads options of torch._inductor.config. A text value is read as JSON if it is valid JSON.

    Raises:
        UsageError: torch does not know an option, or exportkit sets it, or it needs the weights inside of the code.
    """
    known = config.get_config_copy()
    options = {}
    for name, value in given.items():
        if name in _RESERVED and (name, _read_value(value)) != WITHOUT_VECTORS:
            raise UsageError(f"--inductor-config {name}: exportkit sets it, because the package format depends on it")
        if name in _FOR_EMBEDDED_WEIGHTS and not embed_weights:
            raise UsageError(
                f"--inductor-config {name}: weights that can be swapped need exportkit's value",
                hint="Add --embed-weights to keep the weights inside the compiled code and choose a value.",
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            raise UsageError(
                f"torch._inductor.config has no option {name!r}",
                hint=f"Did you mean {', '.join(close)}?" if close else None,
            )
        options[name] = _read_value(value)
    if options.get("cpp.threads") == 1:
        raise UsageError(
            "--inductor-config cpp.threads=1: what Inductor writes for one thread is wrong where more threads run it",
            hint="The process that loads a package chooses the number: OMP_NUM_THREADS=1, or torch.set_num_threads(1).",
        )
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
