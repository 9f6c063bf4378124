"""Outputs of which few elements have nearly all of the error: right code passes, wrong code does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exportkit.accuracy import allowed_error, eager_error
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.record import record
from exportkit.export.record.eager_methods import DescribedModel, EagerMethods
from exportkit.export.record.eager_run import EagerRun, run_eagerly
from exportkit.export.record.outlier_errors import with_outlier_errors
from exportkit.export.record.reference import References, SessionReferences
from exportkit.export.record.sequences import DrawnCall
from exportkit.package.archive import PackageReader
from exportkit.package.case_files import edge_case_in
from exportkit.package.manifest import (
    Accuracy,
    Call,
    OutputTolerance,
    PackagedMethod,
    TensorInput,
    TensorNode,
    TensorOutput,
)
from exportkit.spec import ExportSpec

ROWS, TERMS = 4096, 64
WEIGHTS = torch.randn(TERMS, generator=torch.Generator().manual_seed(0))
OUTPUT = TensorOutput(name="0", dtype="float32", shape=(ROWS,), tolerance=OutputTolerance(rtol=0.0, atol=0.0))


class Inverse(torch.nn.Module):
    """One over sums, of which some are near 0: there a rounding counts a thousand times."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 / (x * WEIGHTS.to(x.dtype)).sum(1)


class Plain(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.exp() * WEIGHTS.abs().to(x.dtype)).sum(1).log()


def rows(seed: int) -> Tensor:
    return torch.randn(ROWS, TERMS, generator=torch.Generator().manual_seed(seed))


def played(model: torch.nn.Module, x: Tensor) -> EagerRun:
    eager = EagerMethods(ExportSpec(model.eval(), (x,)))
    bound = eager.bind("forward", (x,), {})
    given = TensorInput(name="x", dtype="float32", shape=(ROWS, TERMS), written=None)
    call = Call(
        parameters=bound.parameters, inputs=(given,), result=TensorNode(index=0), outputs=(OUTPUT,), dimensions=()
    )
    method = PackagedMethod(name="forward", call=call, state=())
    return run_eagerly(DescribedModel(eager, [method]), [DrawnCall("forward", bound, {})])


@functools.cache
def recorded(make: Callable[[], torch.nn.Module], seed: int) -> tuple[References, Accuracy, Accuracy]:
    """Returns the references of a call, eager's error, and that of right code."""
    session = played(make(), rows(seed))
    known = session.references()
    assert known is not None
    found = [each.parts[0] for each in (known, with_outlier_errors(known, session))]
    errors = [each.accuracy["0"] for each in found if each is not None]
    assert found[0] is not None
    assert errors[0] is not None
    assert errors[1] is not None
    return found[0], errors[0], errors[1]


def passes(values: Tensor, references: References, error: Accuracy) -> bool:
    theirs, allowed = eager_error(OUTPUT, {"0": values}, references.outputs), allowed_error(error, "float32")
    return theirs.rms <= allowed.rms and theirs.greatest <= allowed.greatest


def in_another_order(x: Tensor, seed: int) -> Tensor:
    """What right code computes that adds the terms one by one, in some order."""
    terms, total = (
        (x * WEIGHTS)[:, torch.randperm(TERMS, generator=torch.Generator().manual_seed(seed))],
        x.new_zeros(ROWS),
    )
    for column in terms.T:
        total = total + column
    return 1 / total


def test_right_code_is_three_times_worse_by_luck_and_is_taken_for_right() -> None:
    alarms = {"eager's": 0, "of several runs": 0}
    for seed in range(20):
        references, eager, several = recorded(Inverse, seed)
        for order in range(10):
            values = in_another_order(rows(seed), order)
            alarms["eager's"] += not passes(values, references, eager)
            alarms["of several runs"] += not passes(values, references, several)
    assert alarms["eager's"] >= 40  # of 200
    assert alarms["of several runs"] <= 6


@pytest.mark.parametrize("times", [30, -30])
def test_one_wrong_element_is_seen_all_the_same(times: int) -> None:
    references, eager, several = recorded(Inverse, 0)
    values = references.outputs["0"].clone()
    place = int(values.abs().argmin())
    values[place] += times * eager.greatest * values.abs().median()
    assert not passes(values, references, several)


def test_what_is_well_conditioned_is_held_to_eager_s_error() -> None:
    _, eager, several = recorded(Plain, 0)
    assert several == eager


@pytest.mark.parametrize("seed", range(5))
def test_errors_grow_four_times_at_most_and_the_mean_by_one_element(seed: int) -> None:
    _, eager, several = recorded(Inverse, seed)
    assert eager.greatest < several.greatest <= 4 * eager.greatest
    one = (several.greatest**2 - eager.greatest**2) / ROWS
    assert several.rms**2 == pytest.approx(eager.rms**2 + one)


def test_the_largest_drawn_case_does_for_all_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def seen(known: SessionReferences, session: EagerRun) -> SessionReferences:
        asked.append(session.calls[0].sizes["batch"])
        return with_outlier_errors(known, session)

    monkeypatch.setattr(record, "with_outlier_errors", seen)
    spec = ExportSpec(Plain(), (rows(0)[:3],), dynamic_shapes={"x": {0: "batch[1:64]"}})
    export_program(spec, tmp_path / "program.pt2", TraceOptions(cases=4))
    with PackageReader(tmp_path / "program.pt2") as reader:
        drawn = [case for case in reader.manifest.cases if not edge_case_in(reader, case)]
    assert asked == [max(case.calls[0].sizes["batch"] for case in drawn)]
