"""Graphs on a recorder without a GPU (graphs_on_cpu.cpp): every answer is the model's.

Each call advances one session once, whatever the graphs do.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.libraries import load_library
from tests.runtime import tiny
from tests.runtime.runtime_parts import ROOT, RUNTIME, TORCH, build
from tests.runtime.threads import together

pytestmark = pytest.mark.slow

MOST, MOST_KNOWN, AGEING, MARGIN = 64, 1024, 4096, 8  # of csrc/runtime/graphs
HIDDEN, BIAS = [0.5, -1.0, 2.0, 0.25], torch.tensor([1.0, 2.0, 3.0, 4.0])
# What keeps arguments from being used where they are, and yet the graph is right.
COPIES = ["cannot move", "overlooked", "overlooked state", "writes twice", "one stays", "runs"]
# What leaves no graph.
REFUSED = ["refuses", "wrong", "forgets", "forgets state"]
TOO_GREAT = "99 is out of range"


@functools.cache
def classes() -> Any:
    """Compiles and loads them."""
    sources = [Path(__file__).with_name("graphs_on_cpu.cpp"), RUNTIME / "graphs.cpp", ROOT / "csrc/package/text.cpp"]
    content = [torch.__version__.encode()]
    content += [file.read_bytes() for file in (*sources, RUNTIME / "graphs.h", RUNTIME / "recorder.h")]
    key = hashlib.sha256(b"".join(content)).hexdigest()[:16]
    flags = ["-O0", "-fPIC", "-shared", "-Wl,--no-as-needed", "-ltorch_cpu"]
    load_library(build(tiny.CACHE / f"graphs-{key}" / "libgraphs_on_cpu.so", *sources, flags=flags))
    return torch.classes.graphs_on_cpu


def model(fault: str = "", *, on_first_use: bool = True) -> Any:
    return classes().Model(fault, on_first_use)


def inputs(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + rows)
    return torch.randn(rows, 4, generator=draw), torch.randint(-9, 9, (rows,), generator=draw)


def report(graphs: Any) -> dict[str, Any]:
    return json.loads(graphs.report())


def rows_of(graphs: Any) -> set[int]:
    return {graph["shapes"][0][0] for graph in report(graphs)["graphs"]}


class Session:
    """State, and beside it what it must be. `apart` bytes lie between 256-byte boundaries and its tensors."""

    def __init__(self, hidden: list[float] = HIDDEN, apart: int = 0) -> None:
        self.h, self.c = placed(torch.tensor(hidden), apart), placed(torch.zeros(1, dtype=torch.int64), apart)
        self.b = BIAS.clone()
        self.expected_h, self.expected_c = self.h.clone(), self.c.clone()

    def given(self, x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        return [x, ids, self.h, self.c, self.b]

    def step(self, graphs: Any, rows: int, seed: int = 0, last: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        x, ids = inputs(rows, seed)
        given = self.given(x, ids)
        answer = graphs.run(given) if last is None else graphs.run_again(given, last)
        self.check(answer, x, ids)
        return answer

    def check(self, answer: list[torch.Tensor], x: torch.Tensor, ids: torch.Tensor) -> None:
        """Holds it to the one call more that gave this answer."""
        assert torch.equal(answer[0], x * 2 + 1 + self.expected_h + BIAS)
        assert torch.equal(answer[1], ids + 1 + self.expected_c)
        if len(x):
            self.expected_h += x[0]
        self.expected_c += len(x)
        self.check_state()

    def check_state(self) -> None:
        assert torch.equal(self.h, self.expected_h)
        assert torch.equal(self.c, self.expected_c)
        assert torch.equal(self.b, BIAS)


def placed(tensor: torch.Tensor, apart: int) -> torch.Tensor:
    """A copy that begins `apart` bytes behind a boundary of 256."""
    memory = torch.empty(tensor.nbytes + 512, dtype=torch.uint8)
    begin = -memory.data_ptr() % 256 + apart
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", *COPIES])
def test_each_call_advances_the_state_once_and_answers_stay_valid(fault: str) -> None:
    graphs, session = model(fault), Session()
    answers = [session.step(graphs, rows, seed) for seed in range(3) for rows in (1, 5, 0, 64, 5)]
    copies = [[each.clone() for each in answer] for answer in answers]
    session.step(graphs, 5)
    assert all(all(map(torch.equal, *pair)) for pair in zip(answers, copies))
    assert rows_of(graphs) == {0, 1, 5, 64}
    found = report(graphs)["graphs"]
    assert {graph["copies_inputs"] for graph in found if graph["shapes"][0][0]} == {fault in COPIES}
    calls, _, recordings = graphs.counted()
    assert recordings == 4
    assert calls <= 4 * 2 * 2  # a first run and a recorded one, for each attempt


def test_one_graph_serves_all_sessions() -> None:
    graphs = model()
    sessions = [Session([float(i), 1.0, -2.0, 3.5]) for i in range(6)]
    for turn in range(4):
        for session in sessions:
            session.step(graphs, 3, turn)
    assert graphs.counted() == [2, 24 + 1, 1]  # a first run and a recorded one, a launch to compare, and a graph


def test_a_graph_writes_to_the_last_outputs_if_they_fit() -> None:
    graphs, session = model(), Session()
    last: list[torch.Tensor] = []
    for rows, fits in ((4, False), (4, True), (5, False), (5, True), (4, False)):
        outputs = session.step(graphs, rows, last=last)
        assert [each.data_ptr() for each in outputs] == [each.data_ptr() for each in last] or not fits
        last = outputs
    assert session.step(graphs, 4, last=[each.double() for each in last])[0].dtype == torch.float32


Steps = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 2, 7]), st.integers(0, 5), st.booleans()), max_size=40
)


@settings(max_examples=25, deadline=None)
@given(steps=Steps, fault=st.sampled_from(["", "", "cannot move", "one stays", "writes twice", "wrong"]))
def test_interleaved_sessions_have_the_bits_of_direct_runs(steps: list[Any], fault: str) -> None:
    """Of four sessions, two of which lie where a graph cannot use them; some calls fail."""
    graphs = model(fault)
    sessions = [Session([float(i), 1.0, -2.0, 3.5], apart=16 * (i % 2)) for i in range(4)]
    for number, rows, seed, fails in steps:
        session = sessions[number]
        if fails and not rows:
            # Broken, as of a graph or not: another takes its place.
            x, ids = inputs(2, seed)
            if not rows_of(graphs):
                with pytest.raises(RuntimeError, match=TOO_GREAT):
                    graphs.run(session.given(x, torch.full_like(ids, 99)))
            sessions[number] = Session()
        else:
            session.step(graphs, rows, seed)
        for other in sessions:
            other.check_state()


def test_threads_with_a_session_each() -> None:
    graphs = model()

    def talk(number: int) -> None:
        session = Session([float(number), 1.0, -2.0, 3.5], apart=8 * (number % 2))
        for turn in range(60):
            session.step(graphs, 1 + (number + turn) % 5, turn)

    together(talk, range(8))
    assert rows_of(graphs) == {1, 2, 3, 4, 5}


# --- what is no graph -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_answer_as_the_model_is_no_graph(
    fault: str, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    graphs, session = model(fault), Session()
    for seed in range(3):
        session.step(graphs, 4, seed)
        session.step(graphs, 5, seed)
    found = report(graphs)
    assert found["graphs"] == []
    assert [refused["shapes"][:2] for refused in found["refused"]] == [[[4, 4], [4]], [[5, 4], [5]]]
    reason = found["refused"][0]["reason"]
    assert reason == "it refuses" if fault == "refuses" else "does not answer as a call does" in reason
    warned = capfd.readouterr().err + "".join(str(each.message) for each in recwarn)  # Python's from torch 2.15 on
    assert warned.count("run without a CUDA graph") == 1
    with pytest.raises(RuntimeError, match=r"it refuses|does not answer"):
        graphs.capture(session.given(*inputs(4)))
    session.step(graphs, 4)


def test_a_zero_input_hides_nothing() -> None:
    """A use that was overlooked reads the graph's own inputs, which are zero. So are the first call's inputs."""
    graphs, none = model("overlooked"), torch.zeros(4, dtype=torch.int64)
    graphs.run([torch.zeros(4, 4), none, torch.zeros(4), none[:1].clone(), torch.zeros(4)])
    Session().step(graphs, 4)
    assert [graph["copies_inputs"] for graph in report(graphs)["graphs"]] == [True]


def test_a_call_that_fails_writes_what_the_code_wrote_and_keeps_no_graph_away() -> None:
    """The attempt at a graph runs on copies, so that the state is what one direct run leaves."""
    graphs = model()

    def fail(rows: int) -> None:
        session, (x, ids) = Session(), inputs(rows)
        with pytest.raises(RuntimeError, match=TOO_GREAT):
            graphs.run(session.given(x, torch.full_like(ids, 99)))
        assert torch.equal(session.h, torch.tensor(HIDDEN) + x[0])
        assert session.c.item() == 0

    for _ in range(2):
        fail(4)
    assert report(graphs)["refused"] == []
    Session().step(graphs, 4)
    assert rows_of(graphs) == {4}
    for _ in range(3):
        fail(5)
    (refused,) = report(graphs)["refused"]
    assert refused["reason"] == TOO_GREAT
    calls = graphs.counted()[0]
    Session().step(graphs, 5)
    assert graphs.counted()[0] == calls + 1  # the call, and no further attempt


def test_a_launch_that_fails_is_said() -> None:
    graphs, session = model(), Session()
    session.step(graphs, 2)
    graphs.set_fault("fails")
    with pytest.raises(RuntimeError, match="the driver fails"):
        session.step(graphs, 2)
    session.check_state()


def test_a_callers_own_recording_runs_the_model_itself() -> None:
    graphs, session = model("recorded by another"), Session()
    session.step(graphs, 3)
    assert graphs.counted() == [1, 0, 0]
    with pytest.raises(RuntimeError, match="another graph is being captured"):
        graphs.capture(session.given(*inputs(3)))


def test_what_is_written_shares_no_memory() -> None:
    graphs, session = model(), Session()
    x, ids = inputs(4)
    memory = torch.zeros(64)
    shared = {
        "the whole": [x, ids, session.h, session.c, session.h],
        "a part": [x, ids, memory[:4], session.c, memory[3:7]],
        "an input": [memory[:16].view(4, 4), ids, memory[12:16], session.c, session.b],
        "two that are written": [x, ids, memory[8:12], memory[10:12].view(torch.int64), session.b],
        "inside": [memory.view(16, 4), torch.zeros(16, dtype=torch.int64), memory[20:24], session.c, session.b],
    }
    for _ in range(2):
        for arguments in shared.values():
            before = [argument.clone() for argument in arguments]
            with pytest.raises(RuntimeError, match=r"arguments \d and \d share memory, and the code writes to one"):
                graphs.run(arguments)
            assert all(map(torch.equal, arguments, before))
    memory[:4] = torch.tensor(HIDDEN)
    session.h = memory[:4]
    session.b = memory[4:8].copy_(BIAS)  # side by side is apart
    session.step(graphs, 4)
    one = session.b.view(1, 4)  # inputs that are only read may be one
    session.check(graphs.run(session.given(one, ids[:1])), one, ids[:1])


# --- how many there are -----------------------------------------------------------------------------------------------


def test_settings_that_choose_kernels_have_graphs_of_their_own() -> None:
    graphs, session = model(), Session()
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            session.step(graphs, 3)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert sorted(graph["uses"] for graph in report(graphs)["graphs"]) == [1, 2]


def test_with_more_sizes_than_graphs_none_is_made_in_vain() -> None:
    """If each new size took the place of another, every call of a cycle would make a graph."""
    graphs, session = model(), Session()
    sizes = range(1, MOST + 37)
    for _ in range(4):
        for rows in sizes:
            session.step(graphs, rows)
    calls, launches, recordings = graphs.counted()
    assert recordings == MOST
    assert launches == 4 * MOST + MOST  # the first launch of each is compared
    assert calls == 2 * MOST + 4 * (len(sizes) - MOST)


def test_a_size_that_is_used_more_takes_the_place_of_the_least_used() -> None:
    graphs, session = model(), Session()
    for rows in range(1, MOST + 1):
        for _ in range(3 if rows == 7 else 5):
            session.step(graphs, rows)
    for _ in range(3 + MARGIN):
        session.step(graphs, 100)
    assert rows_of(graphs) == set(range(1, MOST + 1))
    session.step(graphs, 100)
    assert rows_of(graphs) == set(range(1, MOST + 1)) - {7} | {100}
    assert graphs.counted()[2] == MOST  # the other one is gone


def test_after_a_while_old_uses_count_less() -> None:
    graphs, session = model(), Session()
    for rows in range(1, MOST + 1):
        for _ in range(200):
            session.step(graphs, rows)
    given = session.given(*inputs(100))
    for _ in range(3 * AGEING):
        graphs.run(given)
        if 100 in rows_of(graphs):
            break
    assert 100 in rows_of(graphs)


def test_what_was_asked_for_stays() -> None:
    graphs, session = model(), Session()
    for rows in range(1, MOST + 1):
        graphs.capture(session.given(*inputs(rows)))
    for _ in range(50):
        session.step(graphs, 100)
    assert rows_of(graphs) == set(range(1, MOST + 1))
    with pytest.raises(RuntimeError, match="at most 64 graphs"):
        graphs.capture(session.given(*inputs(100)))
    session.step(graphs, 100)


def test_the_number_of_sizes_that_are_counted_is_bounded() -> None:
    graphs, session = model("refuses"), Session()
    for rows in range(1, MOST_KNOWN + 50):
        session.step(graphs, rows)
    assert len(report(graphs)["refused"]) == MOST_KNOWN


@pytest.mark.parametrize("fault", ["", "cannot move", "one stays"])
def test_capture_gives_back_inputs_and_no_state(fault: str) -> None:
    graphs, session = model(fault, on_first_use=False), Session()
    session.step(graphs, 3)
    assert rows_of(graphs) == set()  # only what is asked for is captured
    state = [tensor.to("meta") for tensor in (session.h, session.c, session.b)]
    own = graphs.capture([*inputs(3), *state])
    assert [list(tensor.shape) for tensor in own] == [[3, 4], [3]]
    for seed in range(3):
        x, ids = inputs(3, seed)
        own[0].copy_(x)
        own[1].copy_(ids)
        session.check(graphs.run(session.given(*own)), x, ids)
    assert rows_of(graphs) == {3}
    again = graphs.capture([*inputs(3), *state])
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in own]


def test_a_model_with_other_weights_captures_the_same() -> None:
    graphs, other, session = model(on_first_use=False), model(on_first_use=False), Session()
    for rows in (2, 3):
        graphs.capture(session.given(*inputs(rows)))
    session.check_state()
    other.capture_as(graphs)
    session.step(graphs, 3)
    session.step(other, 3)
    assert rows_of(other) == rows_of(graphs) == {2, 3}
    assert other.counted()[1] == 2 + 1


# --- the recorder of CUDA ---------------------------------------------------------------------------------------------


def test_arguments_that_point_to_inputs_are_found_and_set(tmp_path: Path) -> None:
    """In random graphs, over a driver that remembers what it is told (graph_nodes_on_cpu.cpp)."""
    sources = [Path(__file__).with_name("graph_nodes_on_cpu.cpp"), RUNTIME / "cuda_nodes.cpp"]
    built = build(tmp_path / "graph_nodes", *sources)
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
    flags = ["-c", "-DEXPORTKIT_CUDA_GRAPHS", "-isystem", tmp_path, "-isystem", cuda_include()]
    build(tmp_path / "recorder.o", RUNTIME / "cuda_recorder.cpp", flags=flags)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="there is no ptxas")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_the_kernel_that_copies_is_assembled(tmp_path: Path, architecture: str) -> None:
    _, _, rest = (RUNTIME / "cuda_nodes.cpp").read_text().partition('R"(')
    kernel = tmp_path / "copies.ptx"
    kernel.write_text(rest.partition(')";')[0])
    subprocess.run(["ptxas", f"-arch={architecture}", kernel, "-o", tmp_path / "copies.cubin"], check=True)
