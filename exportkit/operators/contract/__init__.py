"""The operator contract: what an operator promises, and the checks that any operator library can be held to.

It knows no operator library. `tests/arr_coc/ops/test_contract.py` holds ARR-COC's operators to it, `exportkit ops
check` everybody's.
"""

from __future__ import annotations

from exportkit.operators.contract.layout import Layout
from exportkit.operators.contract.operator_spec import OpSpec, Refusal
from exportkit.operators.contract.sample import Sample

__all__ = ["Layout", "OpSpec", "Refusal", "Sample"]
