"""`exportkit bench --profile` times every node of a program, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exportkit.bench import profile_nodes
from exportkit.bench.profile_nodes import ProfileOptions, profile_program
from exportkit.cli import main
from exportkit.errors import ExportError, ModelNotFoundError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.exported_graph import graph_in
from exportkit.package.node_times import read_profile
from tests.artifacts import artifact

QUICK = ProfileOptions(device="cpu", threads=1, seconds=0.001)


def quiet(text: str) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def patches() -> Path:
    return artifact("patches-program")


def test_every_node_has_a_time_and_the_digest_is_the_graph_s(patches: Path, capsys, tmp_path: Path):
    threads, file = torch.get_num_threads(), tmp_path / "profile.json"
    code = main(
        ["bench", str(patches), "--profile", str(file), "--device", "cpu", "--seconds", "0.001", "--threads", "1"]
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    graph, profile = graph_in(patches), read_profile(file)
    assert profile.graph_sha256 == graph.sha256
    assert len(profile.nodes) == len(graph.graph.nodes)
    assert all(0 < time.q1 <= time.median <= time.q3 for time in profile.nodes)
    assert (profile.runs, profile.threads, torch.get_num_threads()) == (5, 1, threads)
    with PackageReader(patches) as reader:
        sizes = reader.manifest.cases[0].calls[0].sizes
    assert profile.sizes == ", ".join(f"{name}={size}" for name, size in sizes.items())
    assert f"{len(profile.nodes)} nodes" in captured.out


def test_the_time_is_the_node_s(patches: Path, monkeypatch: pytest.MonkeyPatch):
    """A clock that goes on by one for each call of an operator gives each node the same time."""
    clock = iter(range(10**9))
    monkeypatch.setattr(profile_nodes.time, "perf_counter_ns", lambda: next(clock) * 10**6)
    profile = profile_program(patches, QUICK, quiet)
    assert {(time.q1, time.median, time.q3) for time in profile.nodes} == {(1, 1, 1)}


def test_a_recorded_case_is_chosen_by_its_size(patches: Path):
    with PackageReader(patches) as reader:
        last = reader.manifest.cases[-1].calls[0].sizes
    size = ",".join(f"{name}={number}" for name, number in last.items())
    options = ProfileOptions(device="cpu", seconds=0.001, size=size)
    assert profile_program(patches, options, quiet).sizes == size.replace(",", ", ")
    largest = ",".join(f"{name}={number + 1}" for name, number in last.items())
    with pytest.raises(UsageError) as refused:
        profile_program(patches, ProfileOptions(device="cpu", size=largest), quiet)
    assert refused.value.exit_code == 2


def test_a_program_of_torch_is_timed_with_its_example(tmp_path: Path):
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first, second = (x + y).split(2)
            return first * 2, second.add_(1)

    path = tmp_path / "two.pt2"
    torch.export.save(torch.export.export(Two(), (torch.ones(4),), {"y": torch.ones(4)}), path)
    profile = profile_program(path, replace(QUICK, trusted=True), quiet)
    assert len(profile.nodes) == len(graph_in(path).graph.nodes)
    with pytest.raises(UsageError, match="has no recorded call of forward"):
        profile_program(path, replace(QUICK, trusted=True, size="batch=2"), quiet)


def test_a_package_of_compiled_code_has_nothing_to_time(tiny_package: Path):
    with pytest.raises(ModelNotFoundError, match="no program"):
        profile_program(tiny_package, QUICK, quiet)


def test_a_graph_that_torch_reads_otherwise_is_refused(patches: Path):
    module = torch.fx.symbolic_trace(torch.nn.Identity())
    with pytest.raises(ExportError, match=r"reads 0 nodes from .*, which has 1"):
        profile_nodes._check_same(patches, module, ["torch.ops.aten.relu.default"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--onnx", "FILE"], "--onnx is not for --profile"),
        (["--against", "eager"], "--against is not for --profile"),
        (["-o", "out.json"], "--output is not for --profile"),
        (["--size", "a=1", "--size", "a=2"], "--profile takes one --size"),
        (["another.pt2"], "--profile times the nodes of one program"),
    ],
)
def test_other_options_are_refused(options: list[str], message: str, patches: Path, capsys, tmp_path: Path):
    given = [str(patches) if option == "FILE" else option for option in options]
    code = main(["bench", str(patches), "--profile", str(tmp_path / "p.json"), *given, "--json"])
    captured = capsys.readouterr()
    assert code == 2
    assert message in json.loads(captured.out)["error"]["message"]
    assert list(tmp_path.iterdir()) == []
