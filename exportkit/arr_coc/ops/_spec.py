"""What the module of an operator says its promises with."""

from __future__ import annotations

from dataclasses import dataclass

from exportkit.operators.contract.layout import Layout, check
from exportkit.operators.contract.operator_spec import OpSpec, Refusal, Sample

__all__ = ["ArrCocSpec", "Layout", "OpSpec", "Refusal", "Sample", "check"]


@dataclass(frozen=True, kw_only=True)
class ArrCocSpec(OpSpec):
    """The promises of `arr_coc::<name>`."""

    namespace: str = "arr_coc"
