"""What the module of an operator says its promises with."""

from __future__ import annotations

from dataclasses import dataclass, field

from exportkit.operators.contract.layout import Layout, check
from exportkit.operators.contract.operator_spec import OpSpec, Refusal
from exportkit.operators.contract.sample import Sample

__all__ = ["ArrCocSpec", "Layout", "OpSpec", "Refusal", "Sample", "check"]


@dataclass(frozen=True, kw_only=True)
class ArrCocSpec(OpSpec):
    """The promises of the operator in the namespace arr_coc that its wrapper is named after."""

    namespace: str = "arr_coc"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.wrapper.__name__)
