"""`export --repair`: the node that is wrong is left to eager's kernel, and what is said where nothing helps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exportkit.cli import main, repair
from exportkit.errors import CompilationError, ExportError
from exportkit.package.archive import PackageReader
from exportkit.package.compiled_with import GivenOptions, compiled_with
from exportkit.verify.verify_worker import VerifyWorker
from tests.subprocesses import compiler_in_forkservers

MODELS = f"{Path(__file__).parent / 'repair_models.py'}"


@pytest.fixture(scope="module", autouse=True)
def _children_have_torchs_compiler() -> Iterator[None]:
    with compiler_in_forkservers():
        yield


def test_options_are_written_as_export_takes_them() -> None:
    given = GivenOptions({"cpp.simdlen": 1}, ("aten.amin.default@amin_2",))
    assert given.arguments == "--inductor-config cpp.simdlen=1 --eager-kernel aten.amin.default@amin_2"
    assert GivenOptions({"cpp.cxx": ["/tmp/evil"], "cpp.simdlen": 1}).plain == GivenOptions({"cpp.simdlen": 1})


@pytest.mark.slow
def test_wrong_code_is_repaired_at_its_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch's own hook makes relu wrong."""
    out = tmp_path / "relu.pt2"
    config = "cpp.inject_relu_bug_TESTING_ONLY=accuracy"
    arguments = ["export", f"{MODELS}:relu", "-o", str(out), "--repair", "--inductor-config", config, "--cases", "1"]
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["repair"]
    assert said["arguments"] == "--eager-kernel aten.relu.default@relu"
    wrong, right = [attempt["result"] for attempt in said["attempts"]]
    assert wrong.startswith("tried no more options: differs: ")
    assert right == "tried aten.relu.default@relu left to eager's kernel: right"
    assert said["places"][0].startswith("node 1 of 1, relu (aten.relu.default), repair_models.py:")
    with PackageReader(out) as reader:
        remembered = compiled_with(reader, reader.manifest.targets[0])
    assert remembered.eager_kernels == ("aten.relu.default@relu",)
    assert main(["verify", str(out), "--against", "cases"]) == 0
    assert main(["inspect", str(out)]) == 0
    assert "--eager-kernel aten.relu.default@relu" in capsys.readouterr().out


@pytest.mark.slow
def test_what_cannot_be_judged_is_not_repaired(tmp_path: Path) -> None:
    """torch computes float16 in float32, and eager with other rounding makes other integers by as much."""
    out = tmp_path / "rounded.pt2"
    assert main(["export", f"{MODELS}:rounded", "-o", str(out), "--repair", "--cases", "1"]) == 0
    with PackageReader(out) as reader:
        remembered = compiled_with(reader, reader.manifest.targets[0])
    assert remembered == GivenOptions({}, ())


def _refusing(monkeypatch: pytest.MonkeyPatch, kind: type[ExportError], message: str) -> list[tuple[str, ...]]:
    """Every export fails with this error; nothing is compiled. Returns the commands."""
    commands: list[tuple[str, ...]] = []

    def ask(_: object, command: repair.Export, *__: Any, **___: Any) -> repair.Exported:
        commands.append(command.words)
        error = {"kind": kind.__name__, "message": message, "hint": "Try it.", "exit_code": kind.exit_code}
        return repair.Exported(kind.exit_code, {"error": error})

    monkeypatch.setattr(VerifyWorker, "ask", ask)
    return commands


def test_where_nothing_helps_everything_that_was_tried_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = "AOTInductor could not compile the program at aten.relu.default, net.py:3: no\nmore"
    commands = _refusing(monkeypatch, CompilationError, refused)
    out = tmp_path / "relu.pt2"
    assert main(["export", "--repair", "--name", "x", "-o", str(out), "--", f"{MODELS}:relu"]) == ExportError.exit_code
    said = capsys.readouterr().err
    report = (tmp_path / "relu.pt2.repair.txt").read_text()
    assert not out.exists()
    for text in (said, report):
        assert "tried no more options: does not compile: AOTInductor could not compile the program at aten.r" in text
        assert "tried no patterns replaced in the graph: does not compile: AOTInductor" in text
        assert "tried every operator left to eager's kernel" in text
    assert "nothing that was tried makes the compiled code right" in said
    end = commands[-1].index("--")
    assert commands[-1] == (
        *("export", "--name", "x", "-o", str(out), "--eager-kernel", "aten"),
        *("--output", commands[-1][end - 2], "--json", "--", f"{MODELS}:relu"),
    )


def test_when_the_time_is_up_only_the_last_way_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repair, "MINUTES", -1)
    commands = _refusing(monkeypatch, CompilationError, "no")
    main(["export", f"{MODELS}:relu", "--repair", "-o", str(tmp_path / "relu.pt2")])
    assert ["--eager-kernel" in words for words in commands] == [False, True]
    assert "tried every operator left to eager's kernel" in capsys.readouterr().err


def test_a_model_that_cannot_be_traced_is_no_matter_of_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = _refusing(monkeypatch, ExportError, "torch.export cannot trace it")
    out = tmp_path / "relu.pt2"
    assert main(["export", f"{MODELS}:relu", "-o", str(out), "--repair"]) == ExportError.exit_code
    assert "torch.export cannot trace it\n  Try it." in capsys.readouterr().err
    assert len(commands) == 1
    assert main(["export", f"{MODELS}:relu", "-o", "x.onnx", "--format", "onnx", "--repair"]) == 2
    assert "--repair is for --format aoti" in capsys.readouterr().err
