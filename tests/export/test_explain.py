"""What torch.export refuses, in the words of the command line."""

from __future__ import annotations

import inspect
import itertools
import re
import shlex
import traceback
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.torch_version import TorchVersion

import exportkit
from exportkit import ExportSpec
from exportkit.errors import ExportError
from exportkit.export.models.call_signature import describe_call
from exportkit.export.models.option_parsing import parse_places
from exportkit.export.models.source_lines import user_frame
from exportkit.export.sizes.declared import declared
from exportkit.export.sizes.guards import GuardLog
from exportkit.export.sizes.shapes import dynamic_sizes, merge_shapes
from exportkit.export.sizes.size_changes import proposals
from exportkit.export.trace.explain import raised_text
from exportkit.export.trace.torch_export import TracingTask
from exportkit.export.trace.trace_method import trace_with_torch_export


def traced(model: torch.nn.Module, args: tuple[Tensor, ...], shapes: dict[str, dict[int, str]]) -> Any:
    spec = ExportSpec(model=model, example_inputs=args, dynamic_shapes=shapes)
    bound = describe_call(model, args, {})
    sizes = dynamic_sizes(shapes, {name: tuple(t.shape) for name, t in zip(bound.names, bound.tensors)})
    return trace_with_torch_export(TracingTask(spec, bound), sizes)


def refused(model: torch.nn.Module, *args: Tensor, **shapes: dict[int, str]) -> ExportError:
    with pytest.raises(ExportError) as caught:
        traced(model, args, shapes)
    assert caught.value.__cause__ is not None
    assert "TORCH_LOGS" not in str(caught.value)
    return caught.value


def options_in(error: ExportError) -> list[str]:
    """The --dynamic options that a hint tells to write, read as a shell reads them."""
    words = shlex.split((error.hint or "").replace("(", "'(").replace(")", ")'"))
    return [following for word, following in itertools.pairwise(words) if word == "--dynamic"]


def advised(model: torch.nn.Module, *args: Tensor, **shapes: dict[int, str]) -> tuple[ExportError, list[str]]:
    """The error and its options, with which torch.export takes the model."""
    error = refused(model, *args, **shapes)
    options = options_in(error)
    assert options
    traced(model, args, merge_shapes(shapes, parse_places(options)))
    return error, options


class Fixed(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(4, 3)


def test_a_size_that_the_code_fixes_is_named_with_the_line_that_fixes_it() -> None:
    error, options = advised(Fixed(), torch.rand(4, 3), x={0: "batch[1:8]"})
    assert "`batch` (x:0)" in error.message
    assert "test_explain.py" in error.message
    assert "`return x + torch.ones(4, 3)` needs x:0 == 4" in error.message
    assert options == ["x:0=4"]
    assert "x:0 is always 4" in (error.hint or "")


class Branch(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 5:
            return x * 2
        return x


def test_a_branch_on_a_size_says_which_range_takes_one_way_through_it() -> None:
    error, options = advised(Branch(), torch.rand(4, 3), x={0: "batch[1:8]"})
    assert "`if x.shape[0] > 5:` needs x:0 <= 5" in error.message
    assert options == ["x:0=batch[1:5]"]


class Rows(torch.nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        b, h, w = image.shape
        return image.reshape(b, h // 16, 16, w)


def test_a_size_that_must_be_a_multiple_is_suggested_as_one() -> None:
    error, options = advised(Rows(), torch.rand(2, 64, 8), image={0: "batch[1:8]", 1: "h[32:128]"})
    assert "`h` (image:1)" in error.message
    assert "`return image.reshape(b, h // 16, 16, w)`" in error.message
    assert options == ["image:1=16*h[2:8]"]


class Sum(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_sizes_that_must_be_equal_are_to_get_one_name() -> None:
    _, options = advised(Sum(), torch.rand(4, 3), torch.rand(4, 3), x={0: "a[1:8]"}, y={0: "b[1:8]"})
    assert options == ["y:0=a[1:8]"]


def test_one_name_for_ranges_that_differ_has_the_sizes_of_both() -> None:
    _, options = advised(Sum(), torch.rand(4, 3), torch.rand(4, 3), x={0: "a[1:8]"}, y={0: "b[2:64]"})
    assert options == ["x:0=a[2:8]", "y:0=a[2:8]"]


def test_a_size_that_another_input_has_too_is_suggested_to_vary_there_too() -> None:
    error, options = advised(Sum(), torch.rand(4, 3), torch.rand(4, 3), x={0: "a[1:8]"})
    assert "`return x + y` needs x:0 == 4" in error.message
    assert options == ["y:0=a[1:8]"]


class Unrelated(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + torch.ones(4, 3)).sum() + y.sum()


def test_equal_sizes_that_have_nothing_to_do_with_each_other_stay_apart() -> None:
    _, options = advised(Unrelated(), torch.rand(4, 3), torch.rand(4, 5), x={0: "a[1:8]"})
    assert options == ["x:0=4"]


class OneOff(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] - 1 == 1 else x


def test_a_value_within_the_range_that_the_code_excludes_bounds_the_suggested_range() -> None:
    error, options = advised(OneOff(), torch.rand(5, 3), x={0: "n[2:9]"})
    assert "needs x:0 - 1 != 1" in error.message
    assert options == ["x:0=n[3:9]"]


def test_torchs_range_beside_the_example_leaves_the_range_of_the_example() -> None:
    """torch suggests the sizes that a trace from another example takes."""
    sizes = dynamic_sizes({"x": {0: "n[16:300]"}}, {"x": (128, 3)})
    log = GuardLog(declared(sizes))
    for torchs, ours in (("min=129, max=300", (16, 128)), ("max=100", (101, 300)), ("min=100", (100, 300))):
        text = f"Constraints violated (n)!\nSuggested fixes:\n  n = Dim('n', {torchs})\n"
        (proposed,) = proposals(text, sizes, {"x": (128, 3)}, log)
        assert [(each.min, each.max) for each in proposed.dimensions] == [ours]


def test_nothing_is_suggested_that_does_not_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exportkit.export.trace.size_search.sizes_that_trace", lambda *_, **__: None)
    error = refused(Fixed(), torch.rand(4, 3), x={0: "batch[1:8]"})
    assert "--dynamic" not in (error.hint or "")
    assert "No sizes that exportkit tried work" in (error.hint or "")


def test_the_callers_own_frames_are_no_lines_of_the_model() -> None:
    package = Path(exportkit.__file__).parent
    files = ["/home/me/script.py", package / "cli" / "app.py", click.__file__, package / "export" / "artifact.py"]
    inside = ["/home/me/model.py", torch.__file__]
    frames = [traceback.FrameSummary(str(file), 1, "function") for file in (*files, *inside)]
    assert user_frame(frames) is frames[4]
    assert user_frame([*frames[:4], frames[5]]) is None


class ByValue(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x


class ByItem(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(3) if int(x.sum().item()) > 2 else x


class OfFound(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].logsumexp(0)


@pytest.mark.parametrize(
    ("model", "what", "advice"),
    [
        (
            OfFound(),
            "torch asks whether Eq(u0, 0) at test_explain.py:{}: `return x[x > 0]",
            "torch._check(x.shape[0] > 0)",
        ),
        (ByValue(), "branches on the value of a tensor at test_explain.py:{}: `if x.sum() > 0:`", "torch.cond"),
        (ByItem(), "needs a number from a tensor as Python's own number at test_explain.py:{}: ", "Leave int()"),
    ],
)
def test_control_flow_by_value_names_the_line_and_what_to_write_instead(
    model: torch.nn.Module, what: str, advice: str, capfd: pytest.CaptureFixture[str]
) -> None:
    error = refused(model, torch.rand(2, 3))
    line = inspect.getsourcelines(type(model))[1] + 2
    assert what.format(f"{line} in forward") in error.message
    assert advice in (error.hint or "")
    assert capfd.readouterr() == ("", "")  # neither half a graph nor advice about torch's own tools


class Numpy(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)


def test_numpy_in_the_model_is_named_with_its_line() -> None:
    error = refused(Numpy(), torch.rand(2, 3))
    assert "NumPy" in error.message
    assert "x.numpy()" in error.message


@pytest.mark.filterwarnings("ignore:.*TorchScript.*", "ignore:.*torch.jit.*")
def test_torchscript_is_named_wherever_it_is_in_the_model() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.jit.script(inner)))
    error = refused(model, torch.rand(2, 3))
    assert re.fullmatch("the model contains TorchScript.*: 1.0", error.message)
    assert "original nn.Module" in (error.hint or "")
    traced(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(inner)), (torch.rand(2, 3),), {})


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
        trace_with_torch_export(TracingTask(spec, describe_call(model, spec.example_inputs, {})), dynamic_sizes({}, {}))


def _loss(x: Tensor) -> Tensor:
    lengths = torch.tensor([4, 4])
    return torch.nn.functional.ctc_loss(x.log_softmax(-1), torch.ones(2, 3, dtype=torch.int64), lengths, lengths - 1)


@pytest.mark.parametrize(
    ("compute", "instead", "advice"),
    [
        (lambda x: torch.linalg.lstsq(x, x[..., :1])[0], lambda x: torch.linalg.pinv(x) @ x[..., :1], "pinv(a) @ b"),
        (lambda x: torch.histogram(x, 4)[0], lambda x: torch.histc(x, bins=4, min=0, max=1), "torch.histc(x, bins=4"),
        (_loss, lambda x: x.log_softmax(-1), "outside of the model"),
    ],
    ids=["least squares", "histogram", "loss"],
)
def test_an_operator_whose_shapes_torch_does_not_know_has_a_substitute(compute, instead, advice) -> None:
    class Computes(torch.nn.Module):
        def __init__(self, what: Any) -> None:
            super().__init__()
            self.what = what

        def forward(self, x: Tensor) -> Tensor:
            return self.what(x)

    x, rows = torch.rand(4, 2, 5), {0: "rows[4:9]"}
    error = refused(Computes(compute), x, x=rows)
    assert error.message.startswith("torch.export does not know the shape of what aten.")
    assert "test_explain.py" in error.message
    assert advice in (error.hint or "")
    assert traced(Computes(instead), (x,), {"x": rows})


class _Pairs(torch.nn.Module):
    """The differences of all pairs: of torch.combinations, and in the two ways that are advised."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("pairs", torch.combinations(torch.arange(5)))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "masked":
            return torch.triu(x[:, None, :] - x[:, :, None], 1).square().sum((1, 2))
        pairs = self.pairs if self.how == "buffer" else torch.combinations(torch.arange(5))
        return (x[:, pairs[:, 1]] - x[:, pairs[:, 0]]).square().sum(1)


def test_pairs_that_torch_selects_with_a_mask_have_two_substitutes() -> None:
    x, rows = torch.rand(4, 5), {0: "rows[1:9]"}
    if TorchVersion(torch.__version__) < "2.14":
        error = refused(_Pairs("combinations"), x, x=rows)
        assert re.match("torch loses track of a size that depends on values at .*test_explain.py:", error.message)
        assert "torch.triu(y, 1)" in (error.hint or "")
    else:
        assert traced(_Pairs("combinations"), (x,), {"x": rows})
    for how in ("buffer", "masked"):
        assert_close(_Pairs(how)(x), _Pairs("combinations")(x))
        assert traced(_Pairs(how), (x,), {"x": rows})


def test_a_fault_of_the_gpu_is_told_without_torchs_advice() -> None:
    torchs = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""
    assert raised_text(RuntimeError(torchs)) == "RuntimeError: CUDA error: an illegal memory access was encountered"
