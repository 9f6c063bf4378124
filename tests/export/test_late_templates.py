"""Templates of kernels are compiled where they are used, and the rules for dtypes are made once."""

from __future__ import annotations

import pytest
from jinja2 import TemplateSyntaxError
from torch._inductor.codegen.common import KernelTemplate
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

from exportkit.export.compiling import inductor_changes
from exportkit.export.compiling.inductor_changes import changed_inductor
from exportkit.export.compiling.late_templates import late_templates


def test_a_template_is_compiled_when_it_is_used() -> None:
    with late_templates():
        right = KernelTemplate._template_from_string("{{ size }} rows")
        wrong = KernelTemplate._template_from_string("{{ size")
    assert right.render(size=3) == right.render(size=3) == "3 rows"
    with pytest.raises(TemplateSyntaxError):
        wrong.render(size=3)
    with pytest.raises(TemplateSyntaxError):  # afterwards at once, as before
        KernelTemplate._template_from_string("{{ size")


def test_rules_for_dtypes_are_made_again_only_where_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    fill = DtypePropagationOpsHandler.__init__
    monkeypatch.setattr(DtypePropagationOpsHandler, "__init__", lambda rules: made.append(1) or fill(rules))
    with changed_inductor():
        rules = DtypePropagationOpsHandler()
        assert DtypePropagationOpsHandler() is rules
        assert made == [1]
        monkeypatch.setitem(
            inductor_changes.op_dtype_propagation_rules,
            "a new operation",
            next(iter(inductor_changes.op_dtype_propagation_rules.values())),
        )
        DtypePropagationOpsHandler()
        assert made == [1, 1]
        assert hasattr(rules, "a new operation")
