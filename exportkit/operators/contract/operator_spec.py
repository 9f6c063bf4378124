"""An operator's promises as data, which the contract tests and `exportkit ops check` test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from exportkit.operators.contract.drawn_refusals import drawn_refusals
from exportkit.operators.contract.layout import FLOATING, Layout
from exportkit.operators.contract.sample import Sample, bound_arguments

Autocast = Literal["float32", "widest", "first"]

# (rtol, atol) of kernel against reference for the same inputs. Both accumulate half types in float32, so they differ by
# the last rounding.
DEFAULT_TOLERANCES: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-4, 1e-5),
    torch.float64: (1e-9, 1e-10),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
}


def default_tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Returns (rtol, atol) of kernel against reference; (0, 0) for dtypes that are not floating."""
    return DEFAULT_TOLERANCES.get(dtype, (0.0, 0.0))


@dataclass(frozen=True)
class Refusal:
    """A call that kernel and fake must refuse with a message that matches the regular expression `message`."""

    label: str
    args: tuple[Any, ...]
    message: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """An operator's promises.

    Attributes:
        namespace: The dispatcher's namespace.
        name: The operator's name in it.
        wrapper: The public function, with the schema's parameters.
        reference: The same function in traceable ATen: the expected result, and the decomposition without a library.
        samples: (device, dtype) -> valid calls. They must cover B = 1, 2, 5, odd sizes and empty tensors. The tests add
            odd strides. Random values come from torch's global generator, which the tests seed. The first sample is
            exported with sizes that vary, and refusals are drawn from it: it has every optional tensor that matters,
            and sizes of at least 2.
        layout: What the tensors and numbers must be, and the results' shapes. It gives the fake kernel its checks, and
            most refusals.
        more_refusals: (device) -> calls that must be refused beside those drawn from the layout.
        static: Names of sizes that the reference needs as numbers, so that they cannot vary where it is traced.
        dtypes: The allowed dtypes of the floating inputs.
        differentiable: Names of the arguments that get gradients; empty if the operator is not differentiable.
        tolerances: (rtol, atol) by dtype that replace the defaults.
        autocast: The dtype that floating arguments are cast to under `torch.autocast`. "float32": at least float32, for
            results that need its precision (scores to rank, sums). "widest": the widest dtype among them. "first": the
            first argument's dtype, for a map of it by parameters. None: no cast, for an operator that takes several
            dtypes or writes to an argument.
        decomposition: Returns what the operator itself returns, where the wrapper returns only a part of it. None: the
            reference does.
        second_order: Whether gradients of gradients work. If not, requesting one must raise.
    """

    namespace: str
    name: str
    wrapper: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[torch.device, torch.dtype], Iterable[Sample]]
    layout: Layout = field(default_factory=Layout)
    more_refusals: Callable[[torch.device], Iterable[Refusal]] | None = None
    static: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATING
    differentiable: tuple[str, ...] = ()
    tolerances: Mapping[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    autocast: Autocast | None = "widest"
    second_order: bool = False
    decomposition: Callable[..., Any] | None = None

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The dispatcher's operator."""
        return getattr(getattr(torch.ops, self.namespace), self.name).default

    @property
    def dynamic(self) -> dict[str, dict[int, str]]:
        """Argument -> dimensions that may be symbolic in torch.export, as `{dim: symbol}`, of the first sample.

        Dimensions with the same symbol are equal.
        """
        with torch.random.fork_rng(devices=[]):
            found = self.layout.dynamic(self._first_call(torch.device("cpu")))
        return {name: {d: s for d, s in dims.items() if s not in self.static} for name, dims in found.items()}

    def refusals(self, device: torch.device) -> Iterator[Refusal]:
        """Yields calls that kernel and fake must refuse: those drawn from the layout, then the others."""
        for label, arguments, message in drawn_refusals(self.name, self.layout, self._first_call(device)):
            yield Refusal(label, tuple(arguments.values()), re.escape(message))
        if self.more_refusals is not None:
            yield from self.more_refusals(device)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns every argument of a call by name, in the schema's order, defaults included."""
        return bound_arguments(self.overload, args, kwargs)

    def _first_call(self, device: torch.device) -> dict[str, Any]:
        sample = next(iter(self.samples(device, self.dtypes[0])))
        return self.arguments(sample.args, sample.kwargs)

    def tolerance(self, dtype: torch.dtype) -> tuple[float, float]:
        """Returns (rtol, atol) of kernel against reference in `dtype`; (0, 0) for dtypes that are not floating."""
        return self.tolerances.get(dtype) or default_tolerance(dtype)
