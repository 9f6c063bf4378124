"""An operator's promises as data, which the contract tests and `exportkit ops check` test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Autocast = Literal["float32", "widest", "first"]

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# (rtol, atol) of kernel against reference for the same inputs. Both accumulate half types in float32, so they differ by
# the last rounding.
DEFAULT_TOLERANCES: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-4, 1e-5),
    torch.float64: (1e-9, 1e-10),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
}


@dataclass(frozen=True)
class Sample:
    """A valid call. `label` describes it, such as "B = 5, odd sizes"."""

    label: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """A call that kernel and fake must refuse with a message that matches the regular expression `message`."""

    label: str
    args: tuple[Any, ...]
    message: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpSpec:
    """An operator's promises.

    Attributes:
        name: The operator's name in the namespace.
        wrapper: The public function, with the schema's parameters.
        reference: The same function in traceable ATen: the expected result, and the decomposition without a library.
        samples: (device, dtype) -> valid calls. They must cover B = 1, 2, 5, odd sizes and empty tensors. The tests add
            odd strides. Random values come from torch's global generator, which the tests seed.
        refusals: (device) -> calls that are refused.
        dtypes: The allowed dtypes of the floating inputs.
        differentiable: Names of the arguments that get gradients; empty if the operator is not differentiable.
        dynamic: Argument name -> dimensions that may be symbolic in torch.export, as `{dim: symbol}`. Dimensions with
            the same symbol are equal. The first sample labelled as exportable is traced: its sizes must be at least 2.
        tolerances: (rtol, atol) by dtype that replace the defaults.
        autocast: The dtype that floating arguments are cast to under `torch.autocast`. "float32": at least float32, for
            results that need its precision (scores to rank, sums). "widest": the widest dtype among them. "first": the
            first argument's dtype, for a map of it by parameters. None: no cast, for an operator that takes several
            dtypes or writes to an argument.
        namespace: The dispatcher's namespace.
        decomposition: Returns what the operator itself returns, where the wrapper returns only a part of it. None: the
            reference does.
        second_order: Whether gradients of gradients work. If not, requesting one must raise.
    """

    name: str
    wrapper: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[torch.device, torch.dtype], Iterable[Sample]]
    refusals: Callable[[torch.device], Iterable[Refusal]]
    dtypes: tuple[torch.dtype, ...] = FLOATING
    differentiable: tuple[str, ...] = ()
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    tolerances: Mapping[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    autocast: Autocast | None = "widest"
    namespace: str = "arr_coc"
    second_order: bool = False
    decomposition: Callable[..., Any] | None = None

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The dispatcher's operator."""
        return getattr(getattr(torch.ops, self.namespace), self.name).default

    def tolerance(self, dtype: torch.dtype) -> tuple[float, float]:
        """Returns (rtol, atol) of kernel against reference in `dtype`; (0, 0) for dtypes that are not floating."""
        if dtype in self.tolerances:
            return self.tolerances[dtype]
        return DEFAULT_TOLERANCES.get(dtype, (0.0, 0.0))
