from __future__ import annotations

import dataclasses
import math
import re
import typing
from pathlib import Path

import pytest

from exportkit import errors
from exportkit.errors import EXIT_CODES
from exportkit.package.manifest import Accuracy
from exportkit.verify import outcomes
from exportkit.verify.comparisons import GradientFinding, OutputComparison
from exportkit.verify.report import Check, Report, TargetReport

COMPARED = OutputComparison("y", "float32", (2, 3), 6, 1, 0.5, (1, 2), 0.25, (0, 1), 1e-3, 1e-5)
GRADIENT = GradientFinding(True, 0.02, 0.001, 1.0, 0.98, output="forces", of="energy", input="positions", scale=-1.0)
EXAMPLES = [
    outcomes.Match((dataclasses.replace(COMPARED, mismatched=0),)),
    outcomes.Mismatch((COMPARED,)),
    outcomes.Unjudged((dataclasses.replace(COMPARED, moves=Accuracy(rms=0.5, greatest=1.0)),)),
    outcomes.WrongDtype("y", "float32", "float16"),
    outcomes.WrongShape("y", (2, 3), (3, 2)),
    outcomes.WrongStructure("a tuple", "a list"),
    outcomes.CallFailed("RuntimeError", "boom"),
    outcomes.RefusedToo(),
    outcomes.NotRefused(),
    outcomes.Crashed(11, None, "running case 0", "last words"),
    outcomes.TimedOut(3.0, "running case 0"),
    outcomes.GradientsHold((dataclasses.replace(GRADIENT, wrong=False),)),
    outcomes.WrongGradient((GRADIENT,), "eager"),
    outcomes.SessionsAgree(8, "equal bits"),
    outcomes.SessionsDiffer("First difference: state cache, 1 of 8 elements.", "fork_shares_state"),
    outcomes.Signed(("ab" * 32,)),
    outcomes.NotRun("two processes died"),
    outcomes.MissingOperator("ns::op", "no library defines it"),
    outcomes.LoadFailed("DigestMismatchError", "record x", 3),
    outcomes.EagerUnavailable("no module", required=True),
    outcomes.EagerDiffers("a" * 64, "b" * 64, "arr-coc"),
    outcomes.EagerFailed("ValueError", "too small", "running the eager model at n=1"),
]


def report(*checks):
    return Report("x.pt2", "2.13.0", (TargetReport("cpu", "cpu", 0.01),), checks)


def check(verdict):
    return Check("cases", "case 0", {}, verdict)


def test_a_gradient_that_nothing_shows_is_not_said_to_be_right() -> None:
    # One atom whose bonds all end at itself: wherever it is, the energy is the same.
    still = dataclasses.replace(GRADIENT, wrong=False, off=0.0, visible=math.inf, change=0.0, work=0.0)
    assert str(still).startswith("whether forces is -1 times the gradient of energy with respect to positions does not")
    assert "rounding hides" in str(dataclasses.replace(still, off=1.0, visible=6.0))
    assert "off by 0.02" in str(dataclasses.replace(GRADIENT, wrong=False))


def test_there_is_an_example_of_every_verdict_and_each_has_a_kind_of_its_own():
    assert len({example.kind for example in EXAMPLES}) == len(EXAMPLES)
    assert {type(example) for example in EXAMPLES} == set(typing.get_args(outcomes.Verdict))


@pytest.mark.parametrize("verdict", EXAMPLES, ids=lambda verdict: verdict.kind)
def test_every_verdict_has_a_message_and_a_documented_exit_code(verdict):
    assert verdict.message
    assert verdict.exit_code in EXIT_CODES


def test_each_way_to_fail_has_an_exit_code_of_its_own():
    # An answer where none is right is a wrong one.
    shared = (outcomes.LoadFailed, outcomes.WrongStructure, outcomes.NotRefused)
    failing = [e for e in EXAMPLES if e.exit_code and not isinstance(e, shared)]
    assert len({e.exit_code for e in failing}) == len(failing)
    assert {e.exit_code for e in EXAMPLES} - {0} == {1, 3} | set(range(10, 22))


def test_every_error_class_has_a_documented_exit_code():
    classes = [value for value in vars(errors).values() if hasattr(value, "exit_code")]
    assert {c.exit_code for c in classes} <= EXIT_CODES.keys()


def test_the_documents_name_no_other_exit_codes():
    for path in (Path(__file__).parents[2] / "docs").rglob("*.md"):
        text = path.read_text()
        table = re.search(r"^\| exit code \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
        named = re.findall(r"exit code (\d+)", text) + re.findall(r"^\| (\d+)", table[0] if table else "", re.MULTILINE)
        assert {int(code) for code in named} <= EXIT_CODES.keys(), path


def test_a_match_names_the_output_that_differs_most():
    near, far = (
        dataclasses.replace(COMPARED, mismatched=0, name=n, max_abs=d) for n, d in (("near", 0.1), ("far", 0.2))
    )
    assert outcomes.Match((near, far)).message == "2 outputs agree, greatest absolute difference 0.2 in far"
    assert outcomes.Match((dataclasses.replace(near, max_abs=0.0),)).message == "1 output agrees exactly"


@pytest.mark.parametrize(
    "detail", ["'_OpNamespace' 'softpool' object has no attribute 'pool'", "operator softpool::pool does not exist"]
)
def test_eager_without_its_operators_is_told_of_op_library(detail):
    assert "--op-library" in outcomes.EagerFailed("AttributeError", detail, "making net:Net").message
    assert "--op-library" not in outcomes.EagerFailed("ValueError", "too small", "making net:Net").message


def test_the_first_failing_check_decides():
    slow = outcomes.TimedOut(1.0, "running case 1")
    assert report(check(EXAMPLES[0]), check(slow), check(EXAMPLES[1])).exit_code == 14
    assert report(check(EXAMPLES[0]), check(outcomes.NotRun("x"))).exit_code == 0
    assert report(check(EXAMPLES[0])).failure is None
    open_question = check(EXAMPLES[2])
    assert report(open_question, check(EXAMPLES[0])).exit_code == 21
    assert report(open_question, check(slow)).exit_code == 14  # what is wrong goes before what cannot be judged
    assert report(open_question, check(slow)).wrong > report(open_question).wrong
