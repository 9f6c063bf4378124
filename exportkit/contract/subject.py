"""What the contract is checked on: an operator, calls of it, and what is known of it beside its schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from exportkit.contract.operator_spec import OpSpec, Sample


@dataclass(frozen=True)
class Subject:
    """An operator under check.

    Attributes:
        overload: The dispatcher's operator.
        calls: Valid calls, in every dtype and on every device that shall be checked.
        reference: A function with the operator's parameters that computes the same with torch's operators. None: the
            kernel is compared only with itself.
        spec: The operator's promises, where it has any. None: each check assumes what the schema says.
    """

    overload: OpOverload
    calls: tuple[Sample, ...]
    reference: Callable[..., Any] | None = None
    spec: OpSpec | None = None

    @property
    def name(self) -> str:
        """`namespace::name`, or `namespace::name.overload`."""
        name = self.overload._schema.name
        return f"{name}.{self.overload._schema.overload_name}" if self.overload._schema.overload_name else name
