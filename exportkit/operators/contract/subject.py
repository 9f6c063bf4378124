"""What the contract is checked on: an operator, calls of it, and what is known of it beside its schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from exportkit.operators.contract.operator_spec import OpSpec, Sample

Resize = Callable[[Sample, Mapping[int, int]], Sample | None]


@dataclass(frozen=True)
class Subject:
    """An operator under check.

    Attributes:
        overload: The dispatcher's operator.
        calls: Valid calls, in every dtype and on every device that shall be checked.
        reference: A function with the operator's parameters that computes the same with torch's operators. None: the
            kernel is compared only with itself.
        spec: The operator's promises, where it has any. None: each check assumes what the schema says.
        resize: Makes a call with other sizes, given which size becomes which; None where it cannot. Without the
            function, every dimension of an old size gets the new one, and an operator that takes integer tensors, which
            may be indices, is not called at other sizes.
    """

    overload: OpOverload
    calls: tuple[Sample, ...]
    reference: Callable[..., Any] | None = None
    spec: OpSpec | None = None
    resize: Resize | None = None

    @classmethod
    def of_spec(cls, spec: OpSpec, devices: Iterable[torch.device] = (torch.device("cpu"),)) -> Subject:
        """The operator of a SPEC, at the SPEC's samples in each of its dtypes."""
        calls = tuple(sample for device in devices for dtype in spec.dtypes for sample in spec.samples(device, dtype))
        return cls(spec.overload, calls, spec.reference, spec)

    @property
    def name(self) -> str:
        """`namespace::name`, or `namespace::name.overload`."""
        schema = self.overload._schema
        return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name

    @property
    def function(self) -> Callable[..., Any]:
        """What users call: the SPEC's wrapper, or the operator."""
        return self.spec.wrapper if self.spec else self.overload

    @property
    def is_mutable(self) -> bool:
        """Whether the operator declares that it writes to an argument."""
        return self.overload._schema.is_mutable
