"""The table of real sizes: what is watched, what is kept of a run, and the page."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from exportkit.export.artifact import traced_model
from exportkit.export.export_options import TraceOptions
from exportkit.progress import silent
from tools import size_catalogue, sizes_table
from tools.size_catalogue import SIZED
from tools.size_page import page
from tools.sizes_table import STEPS, Run
from tools.watched_memory import Finished, Peaks, run_watched

ROOT = Path(__file__).parents[2]
WEIGHTS = [{"shape": [1000, 1000], "dtype": "bfloat16"}, {"shape": [], "dtype": "int64"}]


def test_the_catalogue_has_twelve_models_of_real_size_and_two_with_own_attention() -> None:
    assert len(SIZED) >= 12
    assert max(Counter(model.title for model in SIZED.values()).values()) == 1
    assert all(0.3 <= model.billions <= 8 for model in SIZED.values())
    assert sum(model.library is not None for model in SIZED.values()) == 2
    for name, model in SIZED.items():
        assert model.source == f"tools.size_catalogue:{name}"
        assert "small" in inspect.signature(getattr(size_catalogue, name)).parameters


@pytest.mark.slow
def test_a_small_model_goes_the_way_of_the_large_ones(tmp_path: Path) -> None:
    spec = size_catalogue.dit_xl(small=True)
    assert {tensor.dtype for tensor in spec.model.parameters()} == {torch.bfloat16}
    options = TraceOptions(cases=2, edge_cases=False)
    traced = traced_model(spec, tmp_path / "dit.pt2", options, torch.device("cpu"), silent)
    assert [case.calls[0].sizes for case in traced.cases] == [{"images": 2}, {"images": 1}]


def test_the_memory_of_a_command_and_its_children_is_seen_step_by_step() -> None:
    child = "import time; held = bytearray(b'1' * 80_000_000); time.sleep(2.5)"
    run = f"subprocess.run([sys.executable, '-c', {child!r}])"
    parent = f"import subprocess, sys; print('makes a child', file=sys.stderr); {run}; print('done')"
    done = run_watched([sys.executable, "-c", parent], env=dict(os.environ), timeout=60)
    assert (done.code, done.stdout, done.stderr) == (0, "done\n", "makes a child")
    assert done.peaks.all > done.peaks.own > 80_000_000
    assert [each["step"] for each in done.trace] == ["starting", "makes a child"]
    assert done.trace[1]["own"] > 0.08 > done.trace[0]["own"]


def test_a_command_that_takes_too_long_is_ended_with_its_children() -> None:
    sleeping = "import subprocess; subprocess.run(['sleep', '60'])"
    done = run_watched([sys.executable, "-c", sleeping], env=dict(os.environ), timeout=0.5)
    assert done.code is None
    assert done.seconds < 30


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run. They say what exportkit says; nothing is exported."""
    called: list[list[str]] = []

    def answer(command: list[str], **_: object) -> Finished:
        called.append(command)
        step = command[3] if command[1] == "-m" else "load"
        if "-o" in command:
            file = Path(command[command.index("-o") + 1])
            times = {"call": {"median": 3.21}, "kernels": {"median": 2.5}}
            rows = {"rows": [{"measurements": [{"name": "exportkit", **times}, {"name": "eager", "call": None}]}]}
            file.write_text(json.dumps(rows))
        call = {"dimensions": [{"name": "images", "max": 8}]}
        told = {
            "export": {"file": {"size": 2_100_000}, "manifest": {"weights": WEIGHTS, "methods": [{"call": call}]}},
            "verify": {"checks": [1, 2, 3]},
            "load": {"load": 0.25, "call": 0.5},
        }
        if step == "verify" and "siglip" in str(command):
            return Finished(None, 9.0, "", "running case 0", Peaks(1, 2, 3, 4))
        peaks = Peaks(2_000_000_000, 3_000_000_000, 5_000_000, 2_900_000)
        return Finished(0, 12.0, json.dumps(told.get(step, {})), "", peaks, [{"at": 0.0, "step": "tracing"}])

    monkeypatch.setattr(sizes_table, "run_watched", answer)
    return called


def made(folder: Path) -> Run:
    return Run(folder / "results.json", folder, small=True, gpus=(), end=1e12)


def test_a_run_keeps_what_each_step_said_and_goes_on_where_it_was_stopped(
    commands: list[list[str]], tmp_path: Path
) -> None:
    made(tmp_path).all(["siglip", "dit_xl"])
    models = json.loads((tmp_path / "results.json").read_text())["models"]
    assert models["dit_xl"]["seconds"] == dict.fromkeys(STEPS, 12.0)
    assert models["dit_xl"]["speed"] == {"exportkit": {"call": 3.21, "kernels": 2.5}, "eager": {}}
    assert models["dit_xl"]["weights"] == 0.002000008
    assert (models["dit_xl"]["calls"], models["dit_xl"]["ended"]) == (3, "ok")
    assert models["siglip"]["ended"] == "verify took too long"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    begun = len(commands)
    made(tmp_path).all(["siglip", "dit_xl"])
    assert [command[3] for command in commands[begun:]] == ["export", "package", "verify"]
    bench = next(command for command in commands if command[3] == "bench")
    assert bench[bench.index("--size") + 1] == "images=8"


def test_the_page_of_real_sizes_is_that_of_the_recorded_run() -> None:
    (results,) = (ROOT / "benchmarks" / "sizes").glob("*.json")
    assert page(json.loads(results.read_text())) == (ROOT / "docs" / "models.md").read_text()
