"""The operator contract: what an operator promises, and the checks that any operator library can be held to.

It knows no operator library. `tests/ops/test_contract.py` holds exportkit's own operators to it, `exportkit ops check`
everybody else's.
"""

from __future__ import annotations

from exportkit.contract.layout import Layout
from exportkit.contract.operator_spec import OpSpec, Refusal, Sample

__all__ = ["Layout", "OpSpec", "Refusal", "Sample"]
