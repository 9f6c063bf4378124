"""What the calls of a check left out is said."""

from __future__ import annotations

import torch

from exportkit.cli import main
from exportkit.operators.contract.findings import OperatorReport
from exportkit.operators.contract.sample import Sample
from exportkit.operators.tools.check_worker import never_tried
from tests.operators.tools.conftest import INJECTED


def said(operator, *calls: Sample, passed=(), **skipped: str) -> tuple[str, ...]:
    return never_tried(operator, calls, OperatorReport(operator._schema.name, "", passed, skipped, (), 0))


def test_arguments_of_one_value_are_named():
    x, clamp, stack = torch.ones(3), torch.ops.aten.clamp.default, torch.ops.aten.stack.default
    assert said(clamp, Sample("", (x, 1)), Sample("", (x, 1))) == ("min is always 1", "max is never given")
    assert said(clamp, Sample("", (x, 1)), Sample("", (x,), {"max": 2})) == ()
    assert said(stack, Sample("", ([x, x],))) == ("the length of tensors is always 2", "dim is always 0")
    assert said(stack, Sample("", ([x, x],)), Sample("", ([x], -1))) == ()


def test_the_reason_is_given_why_a_gradient_was_not_checked():
    sin, call = torch.ops.aten.sin.default, Sample("", (torch.ones(3),))
    reason = "no call has a float64 dtype"
    assert said(sin, call, gradcheck=reason) == (f"gradient not checked: {reason}",)
    assert said(sin, call, gradcheck=reason, passed=("gradient-reference",)) == ()
    without = torch.library.Library("without_gradient", "DEF")
    without.define("op(Tensor x) -> Tensor")
    assert said(torch.ops.without_gradient.op.default, call, gradcheck=reason) == ()


def test_it_is_said_where_nothing_judged_the_values():
    call, why = Sample("", (torch.ones(3),)), "no reference is given"
    skipped = {"reference": why, "own-float64": "no call has a float64 dtype"}
    assert said(torch.ops.aten.sin.default, call, **skipped) == (f"values not compared: {why}",)
    assert said(torch.ops.aten.sin.default, call, passed=("own-float64",), reference=why) == ()


def test_the_text_says_it_last(capsys, ops):
    arguments = ["check", str(INJECTED), "--operator", "unheard", "--only", "fake-dtype"]
    assert main(["ops", *arguments]) == 0
    text = capsys.readouterr().out
    assert text.startswith("injected::unheard: ok\n  never tried: how is always 'softly'\n")
    assert text.endswith("ok: 1 operator, 1 not tried in full\n")
    (checked,) = ops(*arguments)[1]["operators"]
    assert checked["never_tried"] == ["how is always 'softly'"]
