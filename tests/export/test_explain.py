"""What torch.export refuses, one reason or all of them, and which sizes work; tests/gallery has the messages."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import shlex
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import Tensor

import exportkit
from exportkit.cli.app import main
from exportkit.errors import ExportError, UsageError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.option_parsing import parse_places
from exportkit.export.models.resolve import resolve
from exportkit.export.models.resolved import EagerModel, SavedProgram
from exportkit.export.models.source_lines import user_frame
from exportkit.export.sizes.shapes import DynamicSizes, dynamic_sizes, merge_shapes
from exportkit.export.sizes.size_changes import changes_between
from exportkit.export.trace import size_search
from exportkit.export.trace.draft import TRIES, draft_of, suggested_changes, with_changes
from exportkit.export.trace.explain import explain_refusal, raised_text
from exportkit.export.trace.judged_sizes import export_judged
from exportkit.export.trace.size_search import sizes_that_trace
from exportkit.export.trace.torch_export import RefusedByTorchError, TracingTask
from exportkit.export.trace.trace_method import trace_with_torch_export
from exportkit.spec import ExportSpec
from tests.export.function_models import Shapes, spec_of, tracing_task
from tests.gallery.entries import operator_library


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


@pytest.mark.slow_but("equal", "apart")
@pytest.mark.parametrize(
    ("function", "inputs", "shapes", "needs", "options"),
    [
        (lambda x: x * 2 if x.shape[0] > 5 else x, (X,), {"x": {0: "n[1:8]"}}, "needs x:0 <= 5", ["x:0=n[1:5]"]),
        # A value within the range bounds it.
        (
            lambda x: x * 2 if x.shape[0] - 1 == 1 else x,
            (torch.rand(5, 3),),
            {"x": {0: "n[2:9]"}},
            "needs x:0 - 1 != 1",
            ["x:0=n[3:9]"],
        ),
        (added, (X, Y), {"x": {0: "a[1:8]"}, "y": {0: "b[1:8]"}}, "x:0 == y:0", ["y:0=a[1:8]"]),
        # One name for ranges that differ has the sizes of both.
        (added, (X, Y), {"x": {0: "a[1:8]"}, "y": {0: "b[2:64]"}}, "x:0 == y:0", ["x:0=a[2:8]", "y:0=a[2:8]"]),
        # Equal sizes that have nothing to do with each other stay apart.
        (lambda x, y: plus_rows(x).sum() + y.sum(), (X, torch.rand(4, 5)), {"x": {0: "a[1:8]"}}, "== 4", ["x:0=4"]),
    ],
    ids=["branch", "value", "equal", "ranges", "apart"],
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


def test_nothing_is_suggested_that_does_not_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exportkit.export.trace.size_search.sizes_that_trace", lambda *_, **__: None)
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


# --- a draft names every reason at once, and sizes are taken as far as the caller allows -----------------------------


GALLERY = Path("tests/gallery")


def eager(function: Callable[..., Any], *inputs: Tensor, **shapes: dict[int, str]) -> EagerModel:
    return EagerModel(spec_of(function, *inputs, shapes=shapes))


def two_branches(x: Tensor, n: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x + 1
    rows = int(n)
    return x * rows


@pytest.mark.parametrize("again", [False, True])  # torch writes a file's name only once in a process
def test_every_line_that_needs_a_value_is_reported_and_nothing_is_left_behind(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    branch, number = draft_of(eager(two_branches, torch.ones(2, 3), torch.tensor(2)), TraceOptions()).findings
    line = inspect.getsourcelines(two_branches)[1] + 1
    assert (branch.file, branch.line) == (__file__, line)
    assert (number.file, number.line) == (__file__, line + 2)
    assert "`if x.sum() > 0:`" in branch.message
    assert "`rows = int(n)`" in number.message
    assert branch.kind == number.kind == "value"
    assert "it was True for the example inputs" in branch.message
    assert "torch.cond" in (branch.hint or "")
    assert "Leave int()" in (number.hint or "")
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_an_operator_that_cannot_travel_is_a_finding() -> None:
    model = resolve(f"{GALLERY}/operators.py:WithoutFake", inputs=["x=float32[4,3]"], op_libraries=[operator_library()])
    (finding,) = draft_of(model, TraceOptions()).findings
    assert (finding.kind, finding.operator) == ("operator", "exportkit_gallery::without_fake")
    assert finding.message.startswith("operator exportkit_gallery::without_fake has no fake kernel")
    assert finding.hint


def rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0] // 8, 8, -1).sum(1)


def short(x: Tensor) -> Tensor:
    return x if x.shape[0] <= 5 else x * 2


def test_sizes_that_are_equal_are_tied_unasked() -> None:
    model = eager(added, X, Y, x={0: "a[1:8]"}, y={0: "b[1:8]"})
    options = with_changes(TraceOptions(), suggested_changes(model, TraceOptions(), allow_narrowing=False))
    assert options.dynamic == ("y:0=a[1:8]",)
    assert suggested_changes(model, options, allow_narrowing=False) == ()  # the model traces with them


@pytest.mark.slow_but("8*None", "12*")
@pytest.mark.parametrize(
    ("given", "works"),
    [
        ("2*n[4:50]", "8*n[1:12]"),
        ("6*n[4:16]", "24*n[1:4]"),
        ("12*n[2:8]", "24*n[1:4]"),
        ("2*n+4[2:48]", "8*n+8[0:11]"),
        ("8*n[1:12]", None),
        ("16*n[1:6]", None),
        ("8*n-8[2:13]", None),
    ],
)
def test_a_factor_that_does_not_suffice_is_refused_with_one_that_does(given: str, works: str | None) -> None:
    """torch.export takes all of these (pytorch#141115)."""
    task, sizes = tracing_task(spec_of(rows, torch.rand(48, 3), shapes={"x": {0: given}}))
    if works is None:
        export_judged(task, sizes)
        return
    with pytest.raises(RefusedByTorchError) as caught:
        export_judged(task, sizes)
    error = explain_refusal(caught.value, task)
    assert "`return x.reshape(x.shape[0] // 8, 8, -1).sum(1)` needs " in error.message
    assert f"--dynamic 'x:0={works}'" in (error.hint or "")


@pytest.mark.parametrize(("function", "dynamic"), [(plus_rows, ("x:0=4",)), (short, ("x:0=n[1:5]",))])
def test_a_range_is_narrowed_only_where_that_is_allowed(
    function: Callable[..., Tensor], dynamic: Sequence[str]
) -> None:
    model = eager(function, X, x={0: "n[1:8]"})
    with pytest.raises(ExportError, match=r"narrower than those asked for.*--allow-narrowing takes them"):
        suggested_changes(model, TraceOptions(), allow_narrowing=False)
    changes = suggested_changes(model, TraceOptions(), allow_narrowing=True)
    assert with_changes(TraceOptions(), changes).dynamic == dynamic


@pytest.mark.parametrize(
    ("before", "after", "narrows"),
    [
        ("n[8:100]", "8*n[1:12]", False),  # 96 is the last multiple
        ("n[8:100]", "8*n[2:12]", True),
        ("n[8:100]", "8*n[1:11]", True),
        ("n[8:100]", "n[9:100]", True),
        ("n[8:100]", "n[8:99]", True),
        ("n[8:100]", "m[8:100]", False),
        ("n[8:100]", "16", True),
        ("16", "n[8:100]", False),
    ],
)
def test_what_counts_as_narrowing(before: str, after: str, narrows: bool) -> None:
    examples = {"x": (16,)}
    old, new = (dynamic_sizes({"x": {0: text}}, examples) for text in (before, after))
    (change,) = changes_between(old, new, examples)
    assert (change.place, change.before, change.after, change.narrows) == ("x:0", before, after, narrows)


def test_the_search_ends_after_the_tries_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    task, sizes = tracing_task(spec_of(plus_rows, X, shapes={"x": {0: "n[1:8]"}}))
    with pytest.raises(RefusedByTorchError) as refused:
        export_judged(task, sizes)
    tried: list[DynamicSizes] = []

    def refuse(task: TracingTask, sizes: DynamicSizes, traces: int) -> None:
        tried.append(sizes)
        raise refused.value

    monkeypatch.setattr(size_search, "export_judged", refuse)
    monkeypatch.setattr(size_search, "proposals", lambda *_: [sizes, sizes])
    assert sizes_that_trace(task, refused.value, TRIES) is None
    assert len(tried) == TRIES == 5


def test_an_exported_program_has_no_sizes_to_change(tmp_path: Path) -> None:
    spec = spec_of(plus_rows, X)
    program = torch.export.export(spec.model, (X,))
    saved = SavedProgram(spec, {"forward": program}, tmp_path / "a.pt2", None)
    with pytest.raises(UsageError, match=r"--draft: .* is an exported program"):
        draft_of(saved, TraceOptions())
    with pytest.raises(UsageError, match=r"--apply-suggested-fixes: .* is an exported program"):
        suggested_changes(saved, TraceOptions(), allow_narrowing=True)


PATCHES = ["export", f"{GALLERY}/sizes.py:Patches", "--input", "image=float32[2,64,8]"]
PATCHES += ["--dynamic", "image:1=h[32:128]"]


@pytest.mark.slow
def test_the_command_prints_the_draft_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PATCHES, "--draft", "--json"]) == 5
    document = json.loads(capsys.readouterr().out)
    assert [finding["kind"] for finding in document["findings"]] == ["size"]
    assert document["changes"][0]["after"] == "16*h[2:8]"
    assert main([*PATCHES, "--draft"]) == 5
    assert "1. the model does not take every size that `h` (image:1)" in capsys.readouterr().out
    assert main([*PATCHES[:4], "--draft"]) == 0
    assert capsys.readouterr().out == "Nothing keeps the model from being exported.\n"


def test_the_command_applies_what_it_suggests_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.pt2"
    assert main([*PATCHES, "--format", "program", "-o", str(out), "--apply-suggested-fixes", "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert [change["after"] for change in document["changes"]] == ["16*h[2:8]"]
    assert document["manifest"]["methods"][0]["call"]["inputs"][0]["shape"][1] == {
        "dimension": "h",
        "scale": 16,
        "offset": 0,
    }
    assert "changed image:1 from h[32:128] to 16*h[2:8]: image:1 is a multiple of 16" in printed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "-o", "x.pt2"], "Give --output FILE, or --draft"),
        (["--draft", "--apply-suggested-fixes"], "give one of them"),
        (["-o", "x.pt2", "--allow-narrowing"], "--allow-narrowing is for --apply-suggested-fixes"),
    ],
)
def test_options_that_exclude_each_other(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*PATCHES, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_detector_of_torchvision_is_led_to_the_recipe():
    spec = spec_of(lambda x: x * 2 if x.sum() > 0 else x, torch.ones(3))
    spec.model.head = type("SSD", (torch.nn.Identity,), {"__module__": "torchvision.models.detection.ssd"})()
    assert "own-models.md of the documentation" in (refused(spec).hint or "")
