"""An input that is declared as written is written in place, and refused where that would spoil something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.errors import InputError
from tests.runtime.stateful import WIDTH, Recorder


@pytest.fixture(scope="module", params=["here", "isolated"])
def model(request: pytest.FixtureRequest, recorder_package: Path, runtime: str) -> Iterator[exportkit.Model]:
    with exportkit.load(recorder_package, isolate=request.param == "isolated") as model:
        yield model


def x(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, WIDTH)


def test_an_input_that_is_declared_as_written_is_written_in_place(model):
    row, out = x(), x()
    eager_out = out.clone()
    expected = Recorder().fill(row, eager_out)
    address = out.data_ptr()
    torch.testing.assert_close(model.fill(row, out), expected)
    torch.testing.assert_close(out, eager_out)
    assert out.data_ptr() == address
    with model.session(batch=5) as session:
        torch.testing.assert_close(session.fill(row, out), Recorder().fill(row, eager_out))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(WIDTH, 2).T, r"`out` must be contiguous, got strides \[1, 2\], because the call writes"),
        (lambda: torch.zeros(1, WIDTH).expand(2, WIDTH), r"`out` must be contiguous, got strides \[0, 1\]"),
        (lambda: torch.zeros(2, WIDTH, requires_grad=True), r"`out` requires gradients(?s:.*)\.detach\(\)"),
        (lambda: torch.nn.Parameter(torch.zeros(2, WIDTH)), r"`out` requires gradients"),
        (lambda: torch._neg_view(torch.zeros(2, WIDTH)), r"`out` must .* be no lazy conjugate or negative"),
        (lambda: torch.zeros(2, WIDTH).double(), r"`out` must be float32, got float64"),
        (lambda: torch.zeros(3, WIDTH), r"`out` has batch = 3"),
    ],
)
def test_an_input_that_cannot_be_written_is_refused(model, make, message):
    out = make()
    before = out.detach().clone()
    with pytest.raises(InputError, match=message):
        model.fill(x(), out)
    assert torch.equal(out.detach(), before)


def test_an_input_that_is_written_and_overlaps_another_is_refused(model):
    base = torch.zeros(4, WIDTH)
    for row, out in ((base[:2], base[:2]), (base[1:3], base[:2]), (base[:2], base[1:3])):
        with pytest.raises(InputError, match=r"`out` shares memory with `x`, and the call writes into `out`"):
            model.fill(row, out)
    assert not base.any()
    model.fill(base[:2], base[2:])  # they are beside one another
