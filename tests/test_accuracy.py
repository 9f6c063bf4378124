"""The arithmetic of the rule, beside the same in plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from exportkit.accuracy import allowed_error, measure_error, rows_at, typical_magnitude
from exportkit.package.manifest import Accuracy, OutputTolerance, TensorOutput

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "typical"),
    [([3.0, -1.0, 2.0], 2.0), ([0.0, 0.0, -5.0], 5.0), ([INF, NAN, 0.25], 0.25), ([0.0, NAN], 1.0), ([], 1.0)],
)
def test_the_typical_magnitude_is_the_median_of_those_that_have_one(values: list[float], typical: float) -> None:
    assert typical_magnitude(torch.tensor(values)) == typical


def test_errors_are_relative_to_the_element_or_to_the_typical_magnitude() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(5, 7, generator=generator, dtype=torch.float64) * 10
    values = (reference + torch.randn(5, 7, generator=generator) * 1e-3).float()
    relative = (values.double() - reference).abs() / reference.abs().clamp(min=2.0)
    found = measure_error(reference, values, typical=2.0, limit=1e-4)
    assert found.size.rms == pytest.approx(float(relative.square().mean().sqrt()), rel=1e-12)
    assert found.size.greatest == pytest.approx(float(relative.max()), rel=1e-12)
    assert (found.compared, found.beyond) == (35, int((relative > 1e-4).sum()))
    assert found.greatest_at == int(relative.argmax())


def test_only_selected_elements_count_and_strides_do_not() -> None:
    reference = torch.zeros(2, 3).t()
    values = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]).t()
    found = measure_error(reference, values, values < 3, typical=1.0)
    assert (found.compared, found.size.greatest, found.greatest_at) == (3, 2.0, 4)


@pytest.mark.parametrize(
    ("reference", "value", "error"),
    [(NAN, NAN, 0.0), (INF, INF, 0.0), (INF, -INF, INF), (NAN, 1.0, INF), (1.0, NAN, INF), (INF, 1.0, INF)],
)
def test_what_is_not_finite_must_be_the_same(reference: float, value: float, error: float) -> None:
    found = measure_error(torch.tensor([reference]), torch.tensor([value]), typical=1.0)
    assert found.size == Accuracy(rms=error, greatest=error)


def test_nothing_selected_has_no_error() -> None:
    found = measure_error(torch.ones(3), torch.zeros(3), torch.zeros(3, dtype=torch.bool), typical=1.0)
    assert (found.compared, found.size) == (0, Accuracy(rms=0.0, greatest=0.0))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_allowed_error_grows_with_eagers_from_a_floor_of_units_in_the_last_place(dtype: str) -> None:
    exact, inexact = (allowed_error(Accuracy(rms=x, greatest=2 * x), dtype) for x in (0.0, 0.5))
    floor = torch.finfo(getattr(torch, dtype)).eps + 64 * torch.finfo(torch.float32).eps
    assert exact == Accuracy(rms=floor, greatest=floor)
    assert inexact == Accuracy(rms=floor + 1.5, greatest=floor + 3.0)


def test_rows_are_found_by_their_index_wherever_the_reference_has_them() -> None:
    output = TensorOutput(
        name="rows", dtype="float32", shape=(), tolerance=OutputTolerance(rtol=0, atol=0, rows_of="indices")
    )
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3, 9, 2, generator=generator)
    known = torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(3)])
    given = torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(3)])
    gathered = [table.gather(1, i.unsqueeze(-1).expand(-1, -1, 2)) for i in (known, given)]
    values, found = rows_at(output, {"rows": gathered[0], "indices": known}, {"indices": given})
    assert found is not None
    expected = torch.tensor([[int(i) in row.tolist() for i in wanted] for row, wanted in zip(known, given)])
    assert torch.equal(found, expected.unsqueeze(-1).expand(-1, -1, 2))
    assert 0 < int(expected.sum()) < 15
    assert torch.equal(values[found], gathered[1][found])
