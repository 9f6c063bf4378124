"""How a model is traced and compiled. These objects travel from the command line to the code that acts on them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from exportkit.errors import UsageError

CpuIsa = Literal["x86-64-v3", "x86-64-v4"]
CudaArch = Literal["native", "native+ptx"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


def check_name(what: str, value: str) -> None:
    """Checks the name or the version of a package.

    Raises:
        UsageError: It has other characters than letters, digits, dots, dashes and underscores, or more than 128.
    """
    if not _NAME.fullmatch(value):
        raise UsageError(
            f"{value!r} cannot be a {what}", hint="Use up to 128 letters, digits, dots, dashes and underscores."
        )


@dataclass(frozen=True)
class TraceOptions:
    """How a model becomes a program with recorded cases.

    Attributes:
        device: `cpu`, `cuda` or `cuda:<index>`.
        dtype: Floating parameters, buffers and inputs are cast to it (`float16`); None leaves them alone.
        dynamic: Sizes that vary, as "image:0=batch[1:64]" or "image:2=16*gh[8:96]". They replace the spec's for that
            dimension.
        static: Every size is fixed at the example inputs', whatever the spec says.
        cases: How many cases to record.
        seed: The seed of the drawn cases.
        name: The package's name; None takes the model's.
        version: The model's version.

    Raises:
        UsageError: The options contradict each other, or a number or name is not allowed.
    """

    device: str = "cpu"
    dtype: str | None = None
    dynamic: Sequence[str] = ()
    static: bool = False
    cases: int = 4
    seed: int = 0
    name: str | None = None
    version: str = "0"

    def __post_init__(self) -> None:
        """Checks what can be checked without a model."""
        if self.static and self.dynamic:
            raise UsageError("static and dynamic exclude each other", hint="Give --static or --dynamic, not both.")
        if self.cases < 0:
            raise UsageError(f"the number of cases is {self.cases}; it must be 0 or more")
        if self.name is not None:
            check_name("name", self.name)
        check_name("version", self.version)


@dataclass(frozen=True)
class CompileOptions:
    """How AOTInductor compiles a program.

    Attributes:
        cpu_isas: Instruction sets the CPU code may use; each becomes a target. None given means x86-64-v3 on x86-64,
            and the architecture's baseline elsewhere.
        cuda_arch: `native` has machine code for this GPU only, `native+ptx` runs on newer ones too.
        inductor_config: Options of torch._inductor.config that override ours.
        embed_weights: Leaves the weights inside the compiled code, for torch's own loaders. They cannot be swapped
            there.
    """

    cpu_isas: Sequence[CpuIsa] = ()
    cuda_arch: CudaArch = "native+ptx"
    inductor_config: Mapping[str, Any] = field(default_factory=dict)
    embed_weights: bool = False
