"""What is no state, and what must not be written: refused by name, with the option that declares it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exportkit import ExportSpec, Method
from exportkit.errors import ExportError, UsageError
from tests.export import state_models as models
from tests.export.function_models import exported
from tests.export.state_models import Decoder, Detector, Writes


def grown(m: Writes, x: Tensor) -> Tensor:
    m.h = torch.cat([m.h, x])
    return m.h.sum(0)


def counted(m: Writes, x: Tensor) -> Tensor:
    m.h += x
    m.calls = getattr(m, "calls", 0) + 1
    return x * m.calls


@pytest.mark.parametrize(
    ("function", "state", "message"),
    [
        (lambda m, x: x + m.h.add_(x), ("seen",), "changes its buffers h(?s:.*)--state NAME"),
        (lambda m, x: x + m.h.mul_(1), (), "changes its buffers h (?s:.*)--state NAME"),
        (lambda m, x: x + m.linear.weight[:2].data.mul_(2), ("h",), "changes its parameters linear.weight"),
        (lambda m, x: x.add_(m.h.add_(x)), ("h",), "writes into its inputs x(?s:.*)--writes NAME"),
        (lambda m, x: x + m.h, ("h",), "the buffer h is declared to be state, and no method writes it"),
        (lambda m, x: x + m.h.add_(x), ("h", "unused"), "the buffer unused is declared .* no method writes it"),
        (lambda m, x: x + m.h.add_(x), ("g*",), r"--state g\* matches no buffer of Writes(?s:.*)h, seen, unused"),
        (lambda m, x: x + m.h.add_(x), ("*",), r"--state \* matches the parameter linear"),
        (grown, ("h",), r"assigns float32\[4, 3\] on cpu to the buffer h, which is float32\[2, 3\] on cpu"),
        (counted, ("h",), "`calls` was 2, then 3"),
    ],
)
def test_what_is_no_state_is_refused_by_name(
    function: Callable[..., Tensor], state: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    spec = ExportSpec(model=Writes(function), example_inputs=(torch.rand(2, 3),), state=state)
    with pytest.raises((ExportError, UsageError), match=message):
        exported(spec, tmp_path)
    assert not (tmp_path / "x.pt2").exists()


def test_an_input_that_is_declared_and_not_written_is_refused(tmp_path: Path) -> None:
    spec = ExportSpec(model=Writes(lambda m, x: x * 2), example_inputs=(torch.rand(2, 3),), writes=("x",))
    with pytest.raises(ExportError, match="the inputs x are declared to be written, and the model does not"):
        exported(spec, tmp_path)
    with pytest.raises(UsageError, match="y is declared to be written, and there is no such input"):
        exported(ExportSpec(model=Writes(lambda m, x: x), example_inputs=(torch.rand(2, 3),), writes=("y",)), tmp_path)


def test_a_view_of_a_weight_or_of_other_state_is_no_state(tmp_path: Path) -> None:
    for view in (lambda m: m.linear.weight.data[:2], lambda m: m.h[:1]):
        model = Writes(lambda m, x: x + m.part.add_(1).sum())
        model.register_buffer("part", view(model))
        with pytest.raises(UsageError, match=r"the state of buffer part shares memory with the (parameter|buffer)"):
            exported(ExportSpec(model=model, example_inputs=(torch.rand(2, 3),), state=("part",)), tmp_path)


def test_one_of_two_tied_buffers_cannot_be_assigned(tmp_path: Path) -> None:
    model = Writes(lambda m, x: setattr(m, "h", m.h + x) or x * 2)
    model.register_buffer("twin", model.h)
    with pytest.raises(UsageError, match="assigns a new tensor to the buffer h, which is also twin"):
        exported(ExportSpec(model=model, example_inputs=(torch.rand(2, 3),), state=("h",)), tmp_path)


def test_rows_that_begin_differently_are_refused_where_their_number_varies(tmp_path: Path) -> None:
    spec = models.streams()
    spec.model.h = torch.arange(12.0).reshape(2, 6)
    with pytest.raises(UsageError, match="the rows of the state h differ"):
        exported(spec, tmp_path)


def test_a_dimension_of_state_must_be_one_of_each_method_that_uses_it(tmp_path: Path) -> None:
    spec = ExportSpec(model=Detector(), example_inputs=(torch.randn(1, 8),), state={"?": "streams"})
    with pytest.raises(UsageError, match="forward takes the state h with a first axis of 1, not of any `streams`"):
        exported(spec, tmp_path)
    with pytest.raises(UsageError, match="--static fixes every size, and the first axis of the state h"):
        exported(models.streams(), tmp_path, static=True)


def test_a_method_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    spec = ExportSpec(model=Decoder(), methods={"speak": Method(example_inputs=(torch.ones(1),))})
    with pytest.raises(UsageError, match=r"the method speak calls Decoder.speak, which does not exist"):
        exported(spec, tmp_path)
