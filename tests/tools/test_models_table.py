"""The table of models: the page has what was run, and nothing else."""

from __future__ import annotations

import importlib
import inspect
import json
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exportkit import ExportSpec
from tools import models_table, more_models
from tools.model_catalogue import CATALOGUE, Model
from tools.models_table import Setup, page, run


def test_every_model_of_the_catalogue_has_its_own_title_and_a_function_that_makes_it() -> None:
    assert len(CATALOGUE) >= 72
    assert max(Counter(model.title for model in CATALOGUE.values()).values()) == 1
    for name, model in CATALOGUE.items():
        module, _, function = model.source.partition(":")
        maker = getattr(importlib.import_module(module), function)
        assert function == name
        assert inspect.signature(maker).return_annotation == "ExportSpec"


@pytest.mark.slow_but("unet", "lstm", "gru", "transformer_encoder")
@pytest.mark.parametrize("name", [name for name, model in CATALOGUE.items() if not model.needs and name != "arr_coc"])
def test_a_model_without_dependencies_runs_on_its_own_inputs(name: str) -> None:
    spec = getattr(more_models, name)()
    assert isinstance(spec, ExportSpec)
    spec.model.eval()(*spec.example_inputs, **spec.example_kwargs)


def table(documents: list[dict[str, Any]]) -> list[str]:
    return [line for line in page(documents).splitlines() if line.startswith("| ") and "---" not in line]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run. They say what exportkit says; nothing is exported."""
    called: list[list[str]] = []

    def answer(command: list[str], **_: object) -> SimpleNamespace:
        called.append(command)
        step = command[3]
        if step != "verify":
            Path(command[command.index("-o") + 1]).write_bytes(b"0" * 2_000_000)
        checks = [{"against": "cases", "label": "case 0", "verdict": {"exit_code": 1, "message": "off by one"}}]
        if step == "verify" and "gru" in str(called[-3:]):
            return SimpleNamespace(returncode=1, stdout=json.dumps({"checks": checks}), stderr="")
        return SimpleNamespace(returncode=0, stdout=json.dumps({"checks": [1, 2]}), stderr="")

    monkeypatch.setattr(models_table.subprocess, "run", answer)
    return called


def test_a_run_goes_on_where_it_was_stopped(commands: list[list[str]], tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    run(["lstm"], Setup(), output, again=False)
    run(["lstm", "gru"], Setup(), output, again=False)
    assert [command[3] for command in commands] == ["export", "package", "verify"] * 2
    models = json.loads(output.read_text())["models"]
    assert (models["lstm"]["ended"], models["lstm"]["calls"], models["lstm"]["megabytes"]) == ("ok", 2, 2.0)
    assert (models["gru"]["ended"], models["gru"]["said"]) == ("verify failed", "cases, case 0: off by one")
    with pytest.raises(SystemExit, match="has results of cpu in float32"):
        run(["gru"], Setup(dtype="bfloat16"), output, again=False)


def test_models_of_a_kind_that_went_alike_share_a_row(commands: list[list[str]], tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    run(["lstm", "gru", "cond", "loop"], Setup(), output, again=False)
    rows = table([json.loads(output.read_text())])
    assert rows[1:4] == [
        "| recurrent | LSTM |✓|",
        "| recurrent | GRU |1|",
        "| control flow | torch.cond; while_loop |✓|",
    ]


def test_several_models_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=30)

    def run_model(model: Model, setup: Setup) -> dict[str, Any]:
        both.wait()
        return {"ended": "ok", "title": model.title}

    monkeypatch.setattr(models_table, "run_model", run_model)
    run(["lstm", "gru"], Setup(), tmp_path / "results.json", again=False, jobs=2)
    models = json.loads((tmp_path / "results.json").read_text())["models"]
    assert {name: result["title"] for name, result in models.items()} == {"lstm": "LSTM", "gru": "GRU"}


def test_tf32_is_asked_for_at_export_and_named_in_the_file_and_on_the_page(
    commands: list[list[str]], tmp_path: Path
) -> None:
    output = tmp_path / "results.json"
    run(["lstm"], Setup(tf32=True), output, again=False)
    assert ["--tf32" in command for command in commands] == [True, False, False]
    document = json.loads(output.read_text())
    assert document["tf32"] is True
    assert table([document])[0] == "| kind | models | CPU TF32 |"
    with pytest.raises(SystemExit, match="has results of cpu in float32 with TF32"):
        run(["gru"], Setup(), output, again=False)


def test_onnx_models_are_exported_and_verified_without_packaging(commands: list[list[str]], tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    run(["lstm"], Setup(format="onnx"), output, again=False)
    assert [command[3] for command in commands] == ["export", "verify"]
    export, verify = commands
    assert export[export.index("--format") + 1] == "onnx"
    assert export[export.index("-o") + 1] == verify[4]
    document = json.loads(output.read_text())
    assert "onnxruntime" in document["versions"]
    assert table([document])[:2] == ["| kind | models | ONNX float32 |", "| recurrent | LSTM |✓|"]
    with pytest.raises(SystemExit, match="has results of cpu in float32, ONNX Runtime"):
        run(["gru"], Setup(), output, again=False)


def test_a_model_whose_library_is_missing_is_left_out(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models_table.importlib.util, "find_spec", lambda name: None)
    run(["bert"], Setup(), tmp_path / "results.json", again=False)
    assert commands == []
    assert "bert: left out, transformers is not installed" in capsys.readouterr().err


def test_the_page_is_that_of_the_recorded_results() -> None:
    root = Path(__file__).parents[2]
    results = sorted((root / "benchmarks" / "models").glob("*.json"))
    assert (
        page(json.loads(path.read_text()) for path in results) == (root / "docs" / "evidence" / "models.md").read_text()
    )
