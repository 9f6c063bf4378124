from __future__ import annotations

import pytest
import torch

from exportkit import Tolerance
from exportkit.errors import UsageError
from exportkit.export.tolerances import output_tolerances
from exportkit.package.manifest import OutputTolerance

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


def test_a_negative_tolerance_is_refused() -> None:
    with pytest.raises(UsageError, match="negative"):
        output_tolerances(OUTPUTS, {"best": Tolerance(-1, 0)})
