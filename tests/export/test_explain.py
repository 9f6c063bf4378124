"""What torch.export refuses, in the words of the command line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from exportkit import ExportSpec
from exportkit.errors import ExportError
from exportkit.export.call_signature import describe_call
from exportkit.export.shapes import dynamic_sizes
from exportkit.export.trace import trace_with_torch_export


def refused(model: torch.nn.Module, *args: Tensor, **shapes: dict[int, str]) -> ExportError:
    spec = ExportSpec(model=model, example_inputs=args, dynamic_shapes=shapes)
    bound = describe_call(model, args, {})
    sizes = dynamic_sizes(shapes, {name: tuple(t.shape) for name, t in zip(bound.names, bound.tensors)})
    with pytest.raises(ExportError) as caught:
        trace_with_torch_export(spec, bound, sizes)
    assert caught.value.__cause__ is not None
    assert "TORCH_LOGS" not in str(caught.value)
    return caught.value


class Fixed(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(4, 3)


def test_a_size_that_the_code_fixes_is_named_with_the_line_that_fixes_it() -> None:
    error = refused(Fixed(), torch.rand(4, 3), x={0: "batch[1:8]"})
    assert "`batch` (x:0)" in error.message
    assert "test_explain.py" in error.message
    assert "`return x + torch.ones(4, 3)`" in error.message
    assert "that size is always 4" in (error.hint or "")


class Branch(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 5:
            return x * 2
        return x


def test_a_branch_on_a_size_says_which_range_takes_one_way_through_it() -> None:
    error = refused(Branch(), torch.rand(4, 3), x={0: "batch[1:8]"})
    assert "`if x.shape[0] > 5:` needs x:0 <= 5" in error.message
    assert error.hint == "Write --dynamic x:0=batch[1:5]."


class Rows(torch.nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        b, h, w = image.shape
        return image.reshape(b, h // 16, 16, w)


def test_a_size_that_must_be_a_multiple_is_suggested_as_one() -> None:
    error = refused(Rows(), torch.rand(2, 64, 8), image={0: "batch[1:8]", 1: "h[32:128]"})
    assert "`h` (image:1)" in error.message
    assert "`return image.reshape(b, h // 16, 16, w)`" in error.message
    assert error.hint == "Write --dynamic image:1=16*h[2:8]."


class Sum(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_sizes_that_must_be_equal_are_to_get_one_name() -> None:
    error = refused(Sum(), torch.rand(4, 3), torch.rand(4, 3), x={0: "a[1:8]"}, y={0: "b[1:8]"})
    assert "--dynamic y:0=a" in (error.hint or "")


def test_a_size_tied_to_one_that_is_fixed_is_explained() -> None:
    error = refused(Sum(), torch.rand(4, 3), torch.rand(4, 3), x={0: "a[1:8]"})
    assert "`return x + y` needs" in error.message
    assert "that size is always 4" in (error.hint or "")


class OneOff(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[1:].contiguous() * 2


def test_a_value_within_the_range_that_the_code_excludes_is_told() -> None:
    error = refused(OneOff(), torch.rand(5, 3), x={0: "n[2:9]"})
    assert "x:0" in error.message
    assert "range in which that holds" in (error.hint or "")


class ByValue(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x


class ByItem(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(3) if int(x.sum().item()) > 2 else x


@pytest.mark.parametrize(("model", "line"), [(ByValue(), "`if x.sum() > 0:`"), (ByItem(), "int(x.sum().item())")])
def test_control_flow_by_value_names_the_line_and_what_to_write_instead(model: torch.nn.Module, line: str) -> None:
    error = refused(model, torch.rand(2, 3))
    assert "branches on the value of a tensor" in error.message
    assert line in error.message
    assert "torch.where" in (error.hint or "")


class Numpy(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)


def test_numpy_in_the_model_is_named_with_its_line() -> None:
    error = refused(Numpy(), torch.rand(2, 3))
    assert "NumPy" in error.message
    assert "x.numpy()" in error.message


class Raises(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            raise KeyError("no such thing")
        return x


def test_any_other_error_keeps_its_class_text_and_line() -> None:
    error = refused(Raises(), torch.rand(2, 3))
    assert "KeyError" in error.message
    assert "no such thing" in error.message
    assert "test_explain.py" in error.message


class Counter(torch.nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x + self.seen


class Overwrites(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) + 1


@pytest.mark.parametrize(
    ("model", "what"), [(Counter(), "changes its buffers seen"), (Overwrites(), "writes into its inputs x")]
)
def test_a_model_that_is_no_function_of_its_inputs_is_refused(model: Any, what: str) -> None:
    spec = ExportSpec(model=model, example_inputs=(torch.rand(2, 3),))
    with pytest.raises(ExportError, match=what):
        trace_with_torch_export(spec, describe_call(model, spec.example_inputs, {}), dynamic_sizes({}, {}))
