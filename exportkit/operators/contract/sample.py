"""A call of an operator, as a value."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree


def tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in a value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def bound_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every argument of a call by name, in the schema's order, defaults included."""
    parameters = operator._schema.arguments
    given = {**dict(zip((p.name for p in parameters), args)), **kwargs}
    return {p.name: given.get(p.name, p.default_value) for p in parameters}


@dataclass(frozen=True)
class Sample:
    """A valid call. `label` describes it, such as "B = 5, odd sizes"."""

    label: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """The call's tensors, in the order of its arguments."""
        return tensors((self.args, dict(self.kwargs)))

    @property
    def elements(self) -> int:
        """How many elements its tensors have."""
        return sum(t.numel() for t in self.tensors)

    @property
    def floating_dtype(self) -> torch.dtype | None:
        """The dtype of its first floating tensor."""
        return next((t.dtype for t in self.tensors if t.is_floating_point()), None)

    @property
    def device(self) -> torch.device:
        """The device of its first tensor, or the CPU."""
        return next((t.device for t in self.tensors), torch.device("cpu"))

    def with_tensors(self, change: Callable[[Tensor], Any]) -> Sample:
        """Returns the call with every tensor changed."""
        args, kwargs = pytree.tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return Sample(self.label, args, kwargs)

    def with_tensor(self, number: int, tensor: Tensor) -> Sample:
        """Returns the call with another tensor in place of its tensor `number`."""
        counter = itertools.count()
        return self.with_tensors(lambda t: tensor if next(counter) == number else t)

    def copied(self) -> Sample:
        """Returns the call on copies, so that an operator that writes to an argument cannot change the next call."""
        return self.with_tensors(lambda t: t.detach().clone(memory_format=torch.preserve_format))


def upcast(call: Sample) -> Sample:
    """Returns the call with every floating tensor in float64."""
    return call.with_tensors(lambda t: t.double() if t.is_floating_point() else t)
