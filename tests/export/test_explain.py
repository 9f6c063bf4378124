"""What torch.export refuses, in the words of the command line; tests/gallery has the messages."""

from __future__ import annotations

import itertools
import re
import shlex
import traceback
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from torch import Tensor

import exportkit
from exportkit.errors import ExportError
from exportkit.export.models.option_parsing import parse_places
from exportkit.export.models.source_lines import user_frame
from exportkit.export.sizes.declared import declared
from exportkit.export.sizes.guards import GuardLog
from exportkit.export.sizes.shapes import dynamic_sizes, merge_shapes
from exportkit.export.sizes.size_changes import proposals
from exportkit.export.trace.explain import raised_text
from exportkit.export.trace.trace_method import trace_with_torch_export
from exportkit.spec import ExportSpec
from tests.export.function_models import Shapes, spec_of, tracing_task


def refused(spec: ExportSpec) -> ExportError:
    with pytest.raises(ExportError) as caught:
        trace_with_torch_export(*tracing_task(spec))
    assert caught.value.__cause__ is not None
    assert "TORCH_LOGS" not in str(caught.value)
    return caught.value


def options_in(error: ExportError) -> list[str]:
    """The --dynamic options that a hint tells to write, read as a shell reads them."""
    words = shlex.split((error.hint or "").replace("(", "'(").replace(")", ")'"))
    return [following for word, following in itertools.pairwise(words) if word == "--dynamic"]


def plus_rows(x: Tensor) -> Tensor:
    return x + torch.ones(4, 3)


def added(x: Tensor, y: Tensor) -> Tensor:
    return x + y


X, Y = torch.rand(4, 3), torch.rand(4, 3)


@pytest.mark.parametrize(
    ("function", "inputs", "shapes", "needs", "options"),
    [
        (plus_rows, (X,), {"x": {0: "batch[1:8]"}}, "`return x + torch.ones(4, 3)` needs x:0 == 4", ["x:0=4"]),
        (lambda x: x * 2 if x.shape[0] > 5 else x, (X,), {"x": {0: "n[1:8]"}}, "needs x:0 <= 5", ["x:0=n[1:5]"]),
        # A value within the range bounds it.
        (
            lambda x: x * 2 if x.shape[0] - 1 == 1 else x,
            (torch.rand(5, 3),),
            {"x": {0: "n[2:9]"}},
            "needs x:0 - 1 != 1",
            ["x:0=n[3:9]"],
        ),
        (
            lambda image: image.reshape(image.shape[0], image.shape[1] // 16, 16, 8),
            (torch.rand(2, 64, 8),),
            {"image": {0: "batch[1:8]", 1: "h[32:128]"}},
            "`h` (image:1)",
            ["image:1=16*h[2:8]"],
        ),
        (added, (X, Y), {"x": {0: "a[1:8]"}, "y": {0: "b[1:8]"}}, "x:0 == y:0", ["y:0=a[1:8]"]),
        # One name for ranges that differ has the sizes of both.
        (added, (X, Y), {"x": {0: "a[1:8]"}, "y": {0: "b[2:64]"}}, "x:0 == y:0", ["x:0=a[2:8]", "y:0=a[2:8]"]),
        (added, (X, Y), {"x": {0: "a[1:8]"}}, "`return x + y` needs x:0 == 4", ["y:0=a[1:8]"]),
        # Equal sizes that have nothing to do with each other stay apart.
        (lambda x, y: plus_rows(x).sum() + y.sum(), (X, torch.rand(4, 5)), {"x": {0: "a[1:8]"}}, "== 4", ["x:0=4"]),
    ],
    ids=["fixed", "branch", "value", "multiple", "equal", "ranges", "follows", "apart"],
)
def test_a_refusal_of_sizes_names_the_line_and_the_sizes_with_which_torch_traces(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], shapes: Shapes, needs: str, options: list[str]
) -> None:
    error = refused(spec_of(function, *inputs, shapes=shapes))
    assert "test_explain.py" in error.message
    assert needs in error.message
    assert options_in(error) == options
    trace_with_torch_export(
        *tracing_task(spec_of(function, *inputs, shapes=merge_shapes(shapes, parse_places(options))))
    )


def test_torchs_range_beside_the_example_leaves_the_range_of_the_example() -> None:
    """torch suggests the sizes that a trace from another example takes."""
    sizes = dynamic_sizes({"x": {0: "n[16:300]"}}, {"x": (128, 3)})
    log = GuardLog(declared(sizes))
    for torchs, ours in (("min=129, max=300", (16, 128)), ("max=100", (101, 300)), ("min=100", (100, 300))):
        text = f"Constraints violated (n)!\nSuggested fixes:\n  n = Dim('n', {torchs})\n"
        (proposed,) = proposals(text, sizes, {"x": (128, 3)}, log)
        assert [(each.min, each.max) for each in proposed.dimensions] == [ours]


def test_nothing_is_suggested_that_does_not_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exportkit.export.trace.explain.sizes_that_trace", lambda *_, **__: None)
    error = refused(spec_of(plus_rows, X, shapes={"x": {0: "batch[1:8]"}}))
    assert "--dynamic" not in (error.hint or "")
    assert "No sizes that exportkit tried work" in (error.hint or "")


def test_the_callers_own_frames_are_no_lines_of_the_model() -> None:
    package = Path(exportkit.__file__).parent
    files = ["/home/me/script.py", package / "cli" / "app.py", click.__file__, package / "export" / "artifact.py"]
    inside = ["/home/me/model.py", torch.__file__]
    frames = [traceback.FrameSummary(str(file), 1, "function") for file in (*files, *inside)]
    assert user_frame(frames) is frames[4]
    assert user_frame([*frames[:4], frames[5]]) is None


@pytest.mark.filterwarnings("ignore:.*TorchScript.*", "ignore:.*torch.jit.*")
def test_torchscript_is_named_wherever_it_is_in_the_model() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    error = refused(
        spec_of(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.jit.script(inner))), X)
    )
    assert re.fullmatch("the model contains TorchScript.*: 1.0", error.message)
    assert "original nn.Module" in (error.hint or "")


def test_a_fault_of_the_gpu_is_told_without_torchs_advice() -> None:
    torchs = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""
    assert raised_text(RuntimeError(torchs)) == "RuntimeError: CUDA error: an illegal memory access was encountered"
