"""An input that is declared as written is written in place, and refused where that would spoil something else."""

from __future__ import annotations

import pytest
import torch

from exportkit.errors import InputError
from tests.runtime.stateful import WIDTH, Recorder


def x(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, WIDTH)


def test_an_input_that_is_declared_as_written_is_written_in_place(every_recorder):
    row, out = x(), x()
    eager_out = out.clone()
    expected = Recorder().fill(row, eager_out)
    address = out.data_ptr()
    torch.testing.assert_close(every_recorder.fill(row, out), expected)
    torch.testing.assert_close(out, eager_out)
    assert out.data_ptr() == address
    with every_recorder.session(batch=5) as session:
        torch.testing.assert_close(session.fill(row, out), Recorder().fill(row, eager_out))


NO_PLACE = [
    (lambda: torch.zeros(WIDTH, 2).T, r"`out` must be contiguous, got strides \[1, 2\], because the call writes"),
    (lambda: torch.zeros(1, WIDTH).expand(2, WIDTH), r"`out` must be contiguous, got strides \[0, 1\]"),
    (lambda: torch.zeros(2, 2 * WIDTH)[:, :WIDTH], r"`out` must be contiguous, got strides \[8, 1\]"),
    (lambda: torch.zeros(2, WIDTH).double(), r"`out` must be float32, got float64"),
    (lambda: torch.zeros(3, WIDTH), r"`out` has batch = 3"),
]


@pytest.mark.parametrize(("make", "message"), NO_PLACE)
def test_an_input_that_cannot_be_written_is_refused(every_recorder, make, message):
    out = make()
    with pytest.raises(InputError, match=message):
        every_recorder.fill(x(), out)
    assert not out.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(2, WIDTH, requires_grad=True), r"`out` requires gradients(?s:.*)\.detach\(\)"),
        (lambda: torch.nn.Parameter(torch.zeros(2, WIDTH)), r"`out` requires gradients"),
        (lambda: torch._neg_view(torch.zeros(2, WIDTH)), r"`out` must .* be no lazy conjugate or negative"),
    ],
)
def test_what_only_torch_has_is_no_place_to_write(recorder, make, message):
    out = make()
    with pytest.raises(InputError, match=message):
        recorder.fill(x(), out)
    assert not out.any()


def test_an_input_that_is_written_and_overlaps_another_is_refused(every_recorder):
    base = torch.zeros(4, WIDTH)
    strided = (base[:3:2], base[2:])
    for row, out in ((base[:2], base[:2]), (base[1:3], base[:2]), (base[:2], base[1:3]), strided):
        with pytest.raises(InputError, match=r"`out` shares memory with `x`, and the call writes into `out`"):
            every_recorder.fill(row, out)
    assert not base.any()
    every_recorder.fill(base[:2], base[2:])  # they are beside one another
