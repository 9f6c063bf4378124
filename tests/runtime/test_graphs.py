"""Which calls become graphs, on a recorder without a GPU (graphs_on_cpu.cpp): every answer is the model's."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.graphs_on_cpu import INCLUDES, RUNTIME, TORCH, Model, inputs, models, program

pytestmark = pytest.mark.slow

MOST, MOST_KNOWN, AGEING, MARGIN = 64, 1024, 4096, 8  # of csrc/runtime/graphs


@pytest.fixture
def model() -> Iterator[Callable[..., Model]]:
    with models() as make:
        yield make


@pytest.mark.parametrize("fault", ["", "cannot move", "overlooked"])
def test_answers_are_the_models_and_stay_valid(model: Any, fault: str) -> None:
    graphs = model(fault)
    kept = [(rows, seed, graphs.check(rows, seed)) for seed in range(3) for rows in (1, 5, 0, 64)]
    for rows, seed, (y, n) in kept:
        x, ids = inputs(rows, seed)
        assert torch.equal(y, x * 2 + 1)
        assert torch.equal(n, ids + 1)
    assert graphs.rows == {0, 1, 5, 64}
    assert {graph["copies_inputs"] for graph in graphs.report["graphs"] if graph["shapes"][0][0]} == {bool(fault)}
    calls, launches, recordings = graphs.counted
    assert recordings == 4
    assert launches >= 12  # and one for each attempt
    assert calls <= 4 * 2 * 2  # a first run and a recorded one, for each attempt


def test_a_graph_writes_to_the_last_outputs_if_they_fit(model: Any) -> None:
    graphs = model()
    last: list[torch.Tensor] = []
    for rows, fits in ((4, False), (4, True), (5, False), (5, True), (4, False)):
        x, ids = inputs(rows, seed=rows)
        y, n = outputs = graphs.again((x, ids), last)
        assert torch.equal(y, x * 2 + 1)
        assert torch.equal(n, ids + 1)
        assert [each.data_ptr() for each in outputs] == [each.data_ptr() for each in last] or not fits
        last = outputs
    doubled = [each.double() for each in last]
    assert graphs.again(inputs(4, seed=4), doubled)[0].dtype == torch.float32


@pytest.mark.parametrize("fault", ["refuses", "wrong", "forgets"])
def test_what_does_not_answer_as_the_model_is_no_graph(
    model: Any, fault: str, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    graphs = model(fault)
    for seed in range(3):
        graphs.check(4, seed)
        graphs.check(5, seed)
    report = graphs.report
    assert report["graphs"] == []
    assert [refused["shapes"] for refused in report["refused"]] == [[[4, 4], [4]], [[5, 4], [5]]]
    reason = report["refused"][0]["reason"]
    assert reason == "it refuses" if fault == "refuses" else "does not answer as a call does" in reason
    warned = capfd.readouterr().err + "".join(str(each.message) for each in recwarn)  # Python's from torch 2.15 on
    assert warned.count("run without a CUDA graph") == 1
    with pytest.raises(RuntimeError, match=r"it refuses|does not answer"):
        graphs.capture(*inputs(4))
    graphs.check(4)


def test_a_zero_input_hides_nothing(model: Any) -> None:
    """A use that was overlooked reads the graph's own inputs, which are zero. So is the first call's input here."""
    graphs = model("overlooked")
    graphs(torch.zeros(4, 4), torch.ones(4, dtype=torch.int64))
    graphs.check(4)
    assert [graph["copies_inputs"] for graph in graphs.report["graphs"]] == [True]


def test_one_call_that_fails_keeps_no_size_from_a_graph(model: Any) -> None:
    graphs = model()
    x, ids = inputs(4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="99 is out of range"):
            graphs(x, torch.full_like(ids, 99))
    assert graphs.report["refused"] == []
    graphs.check(4)
    assert graphs.rows == {4}
    y, n = graphs(x, torch.full_like(ids, 98))
    assert torch.equal(y, x * 2 + 1)
    assert torch.equal(n, torch.full_like(ids, 99))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="99 is out of range"):
            graphs(*(torch.full_like(each, 99) for each in inputs(5)))
    (refused,) = graphs.report["refused"]
    assert refused["reason"] == "99 is out of range"
    calls = graphs.counted[0]
    graphs.check(5)
    assert graphs.counted[0] == calls + 1  # the call, and no further attempt


def test_a_callers_own_recording_runs_the_model_itself(model: Any) -> None:
    graphs = model("recorded by another")
    graphs.check(3)
    assert graphs.counted == (1, 0, 0)
    with pytest.raises(RuntimeError, match="another graph is being captured"):
        graphs.capture(*inputs(3))


def test_settings_that_choose_kernels_have_graphs_of_their_own(model: Any) -> None:
    graphs = model()
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            graphs.check(3)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert sorted(graph["uses"] for graph in graphs.report["graphs"]) == [1, 2]


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.integers(1, 90), max_size=300))
def test_graphs_are_bounded_whatever_is_called(rows: list[int]) -> None:
    graphs = Model()
    try:
        for seed, each in enumerate(rows):
            graphs.check(each, seed % 3)
        assert graphs.counted[2] == len(graphs.report["graphs"]) == min(len(set(rows)), MOST)
    finally:
        graphs.close()


def test_with_more_sizes_than_graphs_none_is_made_in_vain(model: Any) -> None:
    """If each new size took the place of another, every call of a cycle would make a graph."""
    graphs = model()
    sizes = range(1, MOST + 37)
    for _ in range(4):
        for rows in sizes:
            graphs.check(rows)
    calls, launches, recordings = graphs.counted
    assert recordings == MOST
    assert launches == 4 * MOST + MOST  # the first launch of each is compared
    assert calls == 2 * MOST + 4 * (len(sizes) - MOST)


def test_a_size_that_is_used_more_takes_the_place_of_the_least_used(model: Any) -> None:
    graphs = model()
    for rows in range(1, MOST + 1):
        for _ in range(3 if rows == 7 else 5):
            graphs.check(rows)
    for _ in range(3 + MARGIN):
        graphs.check(100)
    assert graphs.rows == set(range(1, MOST + 1))
    graphs.check(100)
    assert graphs.rows == set(range(1, MOST + 1)) - {7} | {100}


def test_after_a_while_old_uses_count_less(model: Any) -> None:
    graphs = model()
    for rows in range(1, MOST + 1):
        for _ in range(200):
            graphs.check(rows)
    for _ in range(3 * AGEING):
        graphs(*inputs(100))
        if 100 in graphs.rows:
            break
    assert 100 in graphs.rows


def test_what_was_asked_for_stays(model: Any) -> None:
    graphs = model()
    for rows in range(1, MOST + 1):
        graphs.capture(*inputs(rows))
    for _ in range(50):
        graphs.check(100)
    assert graphs.rows == set(range(1, MOST + 1))
    with pytest.raises(RuntimeError, match="at most 64 graphs"):
        graphs.capture(*inputs(100))
    graphs.check(100)


def test_the_number_of_sizes_that_are_counted_is_bounded(model: Any) -> None:
    graphs = model("refuses")
    for rows in range(1, MOST_KNOWN + 50):
        graphs.check(rows)
    assert len(graphs.report["refused"]) == MOST_KNOWN


# --- the recorder of CUDA ---------------------------------------------------------------------------------------------


def test_arguments_that_point_to_inputs_are_found_and_set(tmp_path: Path) -> None:
    """In random graphs, over a driver that remembers what it is told (graph_nodes_on_cpu.cpp)."""
    sources = [Path(__file__).with_name("graph_nodes_on_cpu.cpp"), RUNTIME / "cuda_nodes.cpp"]
    built = program(tmp_path / "graph_nodes", *sources)
    ran = subprocess.run([built, "0", "3000"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def cuda_include() -> Path:
    return Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "include"


@pytest.mark.skipif(not (cuda_include() / "cuda_runtime_api.h").exists(), reason="there are no headers of CUDA")
def test_the_recorder_of_cuda_compiles(tmp_path: Path) -> None:
    """A torch for the CPU lacks one header of those that it has for CUDA."""
    missing = tmp_path / "c10/cuda/impl/cuda_cmake_macros.h"
    if not (TORCH / "include/c10/cuda/impl/cuda_cmake_macros.h").exists():
        missing.parent.mkdir(parents=True)
        missing.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    command = [
        "g++",
        "-std=c++20",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-DEXPORTKIT_CUDA_GRAPHS",
        *INCLUDES,
    ]
    command += ["-isystem", tmp_path, "-isystem", cuda_include(), RUNTIME / "cuda_recorder.cpp"]
    subprocess.run(command, check=True)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="there is no ptxas")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_the_kernel_that_copies_is_assembled(tmp_path: Path, architecture: str) -> None:
    _, _, rest = (RUNTIME / "cuda_nodes.cpp").read_text().partition('R"(')
    kernel = tmp_path / "copies.ptx"
    kernel.write_text(rest.partition(')";')[0])
    subprocess.run(["ptxas", f"-arch={architecture}", kernel, "-o", tmp_path / "copies.cubin"], check=True)
