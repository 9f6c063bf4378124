"""`export --repair`: which options are tried, in which order, and what is said where they help and where none does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exportkit.cli import main
from exportkit.errors import ExportError, UsageError
from exportkit.export.compiling.compile_failure import failed_operator
from exportkit.export.compiling.eager_kernels import _is_callable, read_eager_kernels, with_tensors
from exportkit.package.archive import PackageReader
from exportkit.package.compiled_with import GivenOptions, compiled_with
from exportkit.repair.attempts import Costs
from exportkit.repair.remedies import Patient, remedies
from exportkit.verify.bisect_commands import CutPoint
from exportkit.verify.outcomes import Mismatch
from exportkit.verify.report import Check, Report
from tests.subprocesses import compiler_in_forkservers, run_python

FOLDER = Path(__file__).parent
MODELS = f"{FOLDER / 'repair_models.py'}"
KNOWN = ("emulate_precision_casts", "pattern_matcher", "max_fusion_size", "epilogue_fusion", "cpp.simdlen") + (
    "realize_opcount_threshold",
    "realize_cpu_opcount_threshold",
    "cpp.enable_unsafe_math_opt_flag",
    "split_reductions",
)


@pytest.fixture(scope="module", autouse=True)
def _children_have_torchs_compiler() -> Iterator[None]:
    with compiler_in_forkservers():
        yield


# --- what is tried ----------------------------------------------------------------------------------------------------


def _names(known: Sequence[str] = KNOWN, **changes: object) -> list[str]:
    patient = {"device": "cpu", "halves": False, "known": known, "asked": {}, "operators": ("aten.amin.default",)}
    return [remedy.what for remedy in remedies(Patient(**{**patient, **changes}))]  # type: ignore[arg-type]


def test_what_costs_least_is_tried_first_and_what_leaves_all_to_eager_last() -> None:
    assert _names(halves=True) == [
        "values rounded to their dtype, as eager does",
        "aten.amin.default left to eager's kernel",
        "no patterns replaced in the graph",
        "nothing fused",
        "no vector instructions written",
        "all of these together",
        "every operator left to eager's kernel",
    ]


def test_what_cannot_help_is_not_tried() -> None:
    assert "values rounded to their dtype, as eager does" not in _names()
    assert not any("left to eager's" in name for name in _names(operators=("myops.scale.default",))[:-1])
    assert "no vector instructions written" not in _names(device="cuda")
    assert "reductions in one kernel" in _names(device="cuda")
    unsafe = {"cpp.enable_unsafe_math_opt_flag": True}
    assert _names(asked=unsafe)[0] == "without the options that allow inaccurate code"


def test_options_that_this_torch_lacks_are_not_tried() -> None:
    tried = ["no patterns replaced in the graph", "every operator left to eager's kernel"]
    assert _names(("pattern_matcher",), operators=()) == tried


def test_names_of_operators_are_read_and_wrong_ones_refused() -> None:
    assert read_eager_kernels(["aten.amin", "aten::div.Tensor", "amin"]) == (
        "aten.amin.default",
        "aten.amin.out",
        "aten.div.Tensor",
    )
    assert read_eager_kernels(["aten.amin", "aten"]) == ("aten",)
    with pytest.raises(UsageError, match=r"no operator 'aten\.amim'(?s:.*)aten\.amin"):
        read_eager_kernels(["aten.amim"])
    with pytest.raises(UsageError, match="no overload 'Tenzor'"):
        read_eager_kernels(["aten.div.Tenzor"])


@pytest.mark.parametrize(
    ("dtype", "number", "made"),
    [
        (torch.bfloat16, 3.0, torch.float64),
        (torch.int8, 3, torch.int64),
        (torch.int8, 3.0, torch.float32),
        (torch.float32, 2, torch.int64),
    ],
)
def test_a_kernel_gets_tensors_for_numbers_and_answers_the_same(
    dtype: torch.dtype, number: float, made: torch.dtype
) -> None:
    class Divide(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / number

    x = torch.arange(-8, 8).to(dtype)
    module: Any = torch.export.export(Divide(), (x,)).module()
    with_tensors(module, read_eager_kernels(["aten.div.Tensor"]))
    (full,) = [node for node in module.graph.nodes if node.target is torch.ops.aten.full.default]
    assert full.kwargs["dtype"] is made
    answer = module(x)
    assert answer.dtype is Divide()(x).dtype
    assert torch.equal(answer, Divide()(x))


def test_a_conversion_is_compiled_even_where_all_kernels_are_eagers() -> None:
    """torch 2.11's C interface to kernels gives it another dtype."""

    class Narrow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.half() + x

    graph = torch.export.export(Narrow(), (torch.ones(3),)).run_decompositions().graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert torch.ops.aten._to_copy.default in {node.target for node in nodes}
    assert {node.target for node in nodes if _is_callable(node)} == {torch.ops.aten.add.Tensor}


def test_options_are_written_as_export_takes_them() -> None:
    given = GivenOptions({"cpp.simdlen": 1}).with_more(GivenOptions({}, ("aten.amin.default",)))
    assert given.arguments == "--inductor-config cpp.simdlen=1 --eager-kernel aten.amin.default"
    assert GivenOptions({"cpp.cxx": ["/tmp/evil"], "cpp.simdlen": 1}).plain == GivenOptions({"cpp.simdlen": 1})
    assert str(Costs(2.0, 1.0, 3.0)) == "2 ms a call; unrepaired 1 ms, eager 3 ms (at the example's sizes)"


@pytest.mark.parametrize("config", ["cpp.simdlen=1", "cpp.simdlen=8"])
def test_a_vectors_length_can_only_be_one(config: str) -> None:
    from exportkit.export.compiling.compile_plan import read_inductor_config

    name, value = config.split("=")
    if value == "1":
        assert read_inductor_config({name: value}) == {"cpp.simdlen": 1}
    else:
        with pytest.raises(UsageError, match="exportkit sets it"):
            read_inductor_config({name: value})


def test_the_operator_that_the_compiler_refused_is_read_from_its_error() -> None:
    from torch._inductor.exc import LoweringException

    trace = '  File "/home/me/model.py", line 7, in forward\n    y = torch.relu(x)\n'
    cause = LoweringException(ValueError("no"), torch.ops.aten.relu.default, [], {}, stack_trace=trace)
    error = ExportError("AOTInductor could not compile the program")
    error.__cause__ = cause
    found = failed_operator(error)
    assert found is not None
    assert found.name == "aten.relu.default"
    assert found.where.startswith("model.py:7 in forward")
    assert failed_operator(ValueError("no")) is None


@pytest.mark.process
def test_candidates_are_compiled_without_a_network() -> None:
    script = """
import socket, subprocess, sys
from exportkit.child.offline import go_offline
go_offline()
refused = []
for family in (socket.AF_INET, socket.AF_INET6):
    try:
        socket.socket(family)
    except PermissionError:
        refused.append(family)
assert len(refused) == 2, refused
socket.socketpair()
child = "import socket\\ntry:\\n    socket.socket()\\nexcept PermissionError:\\n    raise SystemExit(7)"
assert subprocess.run([sys.executable, "-c", child]).returncode == 7
"""
    run_python(script, cwd=FOLDER)


def test_results_that_are_wrong_by_themselves_are_left_to_eager_as_well() -> None:
    """Of three wrong results, one depends on the node that was found; a fourth is right."""
    from exportkit.repair.repairing import _Part

    names = ("darkest", "shifted", "highest", "n")
    outputs = tuple(SimpleNamespace(name=name, agrees=name == "n") for name in names)
    verdict = Mismatch(outputs)  # type: ignore[arg-type]
    report = Report("a.pt2", None, (), (Check("cases", "case 0", {}, verdict, target="cpu"),))
    call = SimpleNamespace(outputs=[SimpleNamespace(name=name) for name in names])
    results = ("aten.amin.default", "aten.add.Tensor", "aten.amax.default", "aten.sum.dim_IntList")
    search: Any = SimpleNamespace(method=SimpleNamespace(call=call), results=results)
    point = CutPoint("amin", "aten.amin.default", "", ("amin",), reaches=(0, 1))
    located: Any = SimpleNamespace(point=point, points=(point,) * 3, search=SimpleNamespace(fails=0))
    part = _Part(search, located, compiles=False)
    assert part.independent(report) == ["aten.amax.default"]
    assert part.wrong_operators(report) == list(results[:3])
    assert (part.nodes, part.is_whole) == ("1 node", False)


# --- whole repairs ----------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_wrong_code_is_repaired_at_its_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch's own hook makes relu wrong. Leaving the one operator to eager is the first candidate that helps."""
    out = tmp_path / "relu.pt2"
    config = "cpp.inject_relu_bug_TESTING_ONLY=accuracy"
    arguments = ["export", f"{MODELS}:relu", "-o", str(out), "--repair", "--inductor-config", config, "--cases", "1"]
    assert main([*arguments, "--json"]) == 0
    repair = json.loads(capsys.readouterr().out)["repair"]
    assert "node 1 of 1, relu (aten.relu.default), repair_models.py:" in repair["problem"]
    assert repair["arguments"] == "--eager-kernel aten.relu.default"
    assert [(attempt["on"], attempt["right"]) for attempt in repair["attempts"]] == [("the model", True)]
    assert min(repair["milliseconds"].values()) > 0
    with PackageReader(out) as reader:
        remembered = compiled_with(reader, reader.manifest.targets[0])
    assert remembered.eager_kernels == ("aten.relu.default",)
    assert main(["verify", str(out), "--against", "cases"]) == 0
    assert main(["inspect", str(out)]) == 0
    assert "--eager-kernel aten.relu.default" in capsys.readouterr().out


@pytest.mark.process
def test_an_operator_that_does_not_compile_is_left_to_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "refused.pt2"
    assert main(["export", f"{MODELS}:refused", "-o", str(out), "--repair", "--cases", "1"]) == 0
    said = capsys.readouterr().out
    assert "does not compile: AOTInductor could not compile the program" in said
    assert "at aten.relu.default, repair_models.py:" in said
    assert "with --eager-kernel aten.relu.default" in said


@pytest.fixture
def nothing_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate differs; nothing is compiled."""
    from exportkit.repair import repairing

    def wrong(self: object, given: object, path: Path) -> object:
        return repairing._Problem(refused=repairing.NotCompiled("no\nmore", "aten.relu.default", "net.py:3"))

    traced = repairing.ModelTraced(
        manifest="{}",
        device="cpu",
        cpu_isa=None,
        halves=False,
        known=KNOWN,
    )
    monkeypatch.setattr(repairing._Repair, "_whole", wrong)
    monkeypatch.setattr(repairing._Repair, "_ask", lambda *args: traced)
    monkeypatch.setattr(repairing._Repair, "_find_libraries", lambda self: None)
    monkeypatch.setattr(repairing.msgspec.json, "decode", lambda *args, **kwargs: None)


def test_where_nothing_helps_everything_that_was_tried_is_said(
    tmp_path: Path, nothing_helps: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "relu.pt2"
    assert main(["export", f"{MODELS}:relu", "-o", str(out), "--repair"]) == ExportError.exit_code
    said = capsys.readouterr().err
    report = (tmp_path / "relu.pt2.repair.txt").read_text()
    assert not out.exists()
    for text in (said, report):
        assert "at aten.relu.default, net.py:3" in text
        assert "tried aten.relu.default left to eager's kernel, the model: does not compile: no (0 s)" in text
        assert "tried every operator left to eager's kernel" in text
    assert "nothing that was tried makes the compiled code right" in said


def test_options_of_a_repair_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"{MODELS}:relu", "-o", "x.pt2", "--repair-minutes", "3"]) == 2
    assert main(["export", f"{MODELS}:relu", "-o", "x.onnx", "--format", "onnx", "--repair"]) == 2
    assert "--repair is for --format aoti" in capsys.readouterr().err
