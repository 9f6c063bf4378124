from __future__ import annotations

import pytest
import torch

from exportkit import Tolerance
from exportkit.errors import UsageError
from exportkit.export.record.tolerances import DEFAULTS, accuracy_outputs, output_tolerances
from exportkit.package.manifest import OutputTolerance, TensorOutput

OUTPUTS = [("scores", torch.float32), ("best", torch.int64)]


def test_what_the_spec_leaves_out_gets_its_dtypes_default_and_integers_are_exact() -> None:
    scores, best = output_tolerances(OUTPUTS, {})
    assert 0 < scores.atol <= scores.rtol < 1e-3
    assert best == OutputTolerance(rtol=0, atol=0)


def test_the_specs_own_tolerance_is_taken_whole() -> None:
    given = {"best": Tolerance(0, 0, ranking_of="scores")}
    assert output_tolerances(OUTPUTS, given)[1] == OutputTolerance(rtol=0, atol=0, ranking_of="scores")


@pytest.mark.parametrize(
    "given",
    [{"score": Tolerance(0, 0)}, {"best": Tolerance(0, 0, ranking_of="score")}, {"best": Tolerance(0, 0, rows_of="x")}],
)
def test_an_output_that_is_not_there_is_refused_with_those_that_are(given) -> None:
    with pytest.raises(UsageError, match=r"\n.*scores, best"):
        output_tolerances(OUTPUTS, given)


@pytest.mark.parametrize("part", [-1, float("nan"), float("inf")])
def test_a_tolerance_that_is_none_is_refused_where_it_is_written(part: float) -> None:
    with pytest.raises(UsageError, match="finite and not negative"):
        Tolerance(0, part)


@pytest.mark.parametrize("numbers", [(1e-3, None), (None, 1e-3)])
def test_one_number_alone_is_refused(numbers: tuple[float | None, float | None]) -> None:
    with pytest.raises(UsageError, match=r"only one of them is given\n.*both"):
        Tolerance(*numbers)


def test_floating_outputs_without_numbers_are_held_to_eagers_accuracy() -> None:
    outputs = [
        TensorOutput(name=name, dtype=dtype, shape=(), tolerance=OutputTolerance(rtol=0, atol=0))
        for name, dtype in (("free", "float32"), ("rows", "bfloat16"), ("numbers", "float32"), ("best", "int64"))
    ]
    given = {"rows": Tolerance(rows_of="best"), "numbers": Tolerance(0, 1e-3), "best": Tolerance(ranking_of="free")}
    assert accuracy_outputs(outputs, given) == ("free", "rows")


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
def test_a_cast_model_is_held_to_its_dtype_and_exact_outputs_stay_exact(cast: torch.dtype) -> None:
    rtol, atol = DEFAULTS[cast]
    outputs = [("features", cast), ("budgets", torch.int64), ("best", torch.int64), ("logits", torch.float32)]
    given = {
        "features": Tolerance(1e-3, 0.5, rows_of="best"),
        "budgets": Tolerance(0, 1),
        "best": Tolerance(0, 0, ranking_of="features"),
    }
    features, budgets, best, logits = output_tolerances(outputs, given, cast=cast)
    assert features == OutputTolerance(rtol=rtol, atol=0.5, rows_of="best")
    assert budgets == OutputTolerance(rtol=rtol, atol=1)
    assert best == OutputTolerance(rtol=0, atol=0, ranking_of="features")
    assert logits == OutputTolerance(rtol=rtol, atol=atol)


def test_a_wide_output_of_a_cast_model_keeps_the_tolerance_that_was_written_for_it() -> None:
    """Such as positions, which are computed of exact indices."""
    (positions,) = output_tolerances([("p", torch.float32)], {"p": Tolerance(0, 1e-6)}, cast=torch.bfloat16)
    assert positions == OutputTolerance(rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_smallest_floats_may_be_one_step_off(dtype: torch.dtype) -> None:
    (tolerance,) = output_tolerances([("x", dtype)], {})
    steps = torch.arange(0, 40, dtype=torch.uint8).view(dtype).double()
    assert (steps.diff() <= tolerance.atol + tolerance.rtol * steps[:-1]).all()
