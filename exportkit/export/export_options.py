"""Options for tracing and compiling a model. The command line passes these objects to the code that uses them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from exportkit.errors import UsageError

CudaArch = Literal["native", "native+ptx"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


def check_name(what: str, value: str) -> None:
    """Checks the name or the version of a package.

    Raises:
        UsageError: The value is empty, longer than 128 characters, starts with a dot or a dash, or has characters other
            than letters, digits, dots, dashes and underscores.
    """
    if not _NAME.fullmatch(value):
        raise UsageError(
            f"{value!r} is not allowed as a {what}",
            hint="Use 1 to 128 letters, digits, dots, dashes and underscores. Do not start with a dot or a dash.",
        )


@dataclass(frozen=True)
class TraceOptions:
    """How to trace a model and record cases.

    Attributes:
        device: `cpu`, `cuda` or `cuda:<index>`.
        dtype: The dtype to cast floating parameters, buffers and inputs to, such as `float16`. None does not cast.
        dynamic: Dynamic sizes, as "image:0=batch[1:64]" or "image:2=16*gh[8:96]". They replace the spec's entry for
            that dimension.
        ranges: Ranges of dynamic sizes by name, as "length=1:4096". They replace those of the spec and of `dynamic`.
        static: Fixes every size to the example inputs' and ignores the spec's dynamic sizes.
        cases: The number of cases to record.
        seed: The seed of the drawn cases.
        name: The package's name. None takes the model's name.
        version: The model's version.
        allow_nondeterministic: Exports a model whose answers to the same inputs differ. Only their dtypes and shapes
            are verified then.
        state: Patterns of buffers that are state, in addition to the spec's.
        edge_cases: Records cases with edge values, too, if two or more are recorded.
        writes: Inputs that are written, in addition to the spec's: of every method that has an input of that name.
        tf32: Lets torch round the factors of float32 products and convolutions to TF32 when cases are recorded, and
            so in `verify`.

    Raises:
        UsageError: The options contradict each other, or a number or name is not allowed.
    """

    device: str = "cpu"
    dtype: str | None = None
    dynamic: Sequence[str] = ()
    ranges: Sequence[str] = ()
    static: bool = False
    cases: int = 4
    seed: int = 0
    name: str | None = None
    version: str = "0"
    allow_nondeterministic: bool = False
    tf32: bool = False
    state: Sequence[str] = ()
    writes: Sequence[str] = ()
    edge_cases: bool = True

    def __post_init__(self) -> None:
        """Checks the options that do not depend on a model."""
        if self.static and (self.dynamic or self.ranges):
            raise UsageError(
                "static and dynamic exclude each other", hint="Give either --static or --dynamic and --range."
            )
        if self.cases < 0:
            raise UsageError(f"the number of cases must be at least 0, got {self.cases}")
        if self.name is not None:
            check_name("name", self.name)
        check_name("version", self.version)


@dataclass(frozen=True)
class CompileOptions:
    """How to compile a program with AOTInductor.

    Attributes:
        cpu_isas: The instruction sets to compile CPU code for; each becomes a target. Empty means x86-64-v3 on x86-64
            and armv8-a on aarch64.
        cuda_arch: `native` compiles machine code for this GPU only; `native+ptx` also runs on newer GPUs.
        inductor_config: Options of torch._inductor.config that override exportkit's.
        embed_weights: Keeps the weights inside the compiled code, for torch's own loaders. They cannot be swapped then.
        eager_kernels: Operators of torch that the code leaves to eager's kernels, such as `aten.amin`.
        cache: Takes code that was compiled before from the cache, and keeps there what is compiled.
    """

    cpu_isas: Sequence[str | None] = ()
    cuda_arch: CudaArch = "native+ptx"
    inductor_config: Mapping[str, Any] = field(default_factory=dict)
    embed_weights: bool = False
    eager_kernels: Sequence[str] = ()
    cache: bool = True
