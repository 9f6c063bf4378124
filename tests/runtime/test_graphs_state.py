"""Graphs of a model that writes arguments: each call advances one session once, whatever the graphs do.

On a recorder without a GPU (graphs_on_cpu.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.graphs_on_cpu import Model, inputs, models

pytestmark = pytest.mark.slow

HIDDEN = [0.5, -1.0, 2.0, 0.25]
# What keeps arguments from being used where they are, and yet the graph is right.
COPIES = ["cannot move", "overlooked", "overlooked state", "overlooked write", "writes twice", "one stays", "runs"]
# What leaves no graph.
REFUSED = ["refuses", "wrong", "forgets state"]


@pytest.fixture
def model() -> Iterator[Callable[..., Model]]:
    with models() as make:
        yield lambda *given, **named: make(*given, with_state=True, **named)


class Session:
    """State, and beside it what it must be. `apart` bytes lie between 256-byte boundaries and its tensors."""

    def __init__(self, hidden: list[float] = HIDDEN, apart: int = 0) -> None:
        self.h, self.c = placed(torch.tensor(hidden), apart), placed(torch.zeros(1, dtype=torch.int64), apart)
        self.b = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.expected_h, self.expected_c = self.h.clone(), self.c.clone()

    def step(self, graphs: Model, rows: int, seed: int = 0) -> list[torch.Tensor]:
        x, ids = inputs(rows, seed)
        y, n = answer = graphs(x, ids, self.h, self.c, self.b)
        assert torch.equal(y, x * 2 + 1 + self.expected_h + self.b)
        assert torch.equal(n, ids + 1 + self.expected_c)
        if rows:
            self.expected_h += x[0]
        self.expected_c += rows
        self.check()
        return answer

    def check(self) -> None:
        assert torch.equal(self.h, self.expected_h)
        assert torch.equal(self.c, self.expected_c)
        assert torch.equal(self.b, torch.tensor([1.0, 2.0, 3.0, 4.0]))


def placed(tensor: torch.Tensor, apart: int) -> torch.Tensor:
    """A copy that begins `apart` bytes behind a boundary of 256."""
    memory = torch.empty(tensor.nbytes + 512, dtype=torch.uint8)
    begin = -memory.data_ptr() % 256 + apart
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("fault", ["", *COPIES, *REFUSED])
def test_each_call_advances_the_state_once(model: Any, fault: str) -> None:
    graphs, session = model(fault), Session()
    for seed in range(3):
        for rows in (1, 5, 2, 5):
            session.step(graphs, rows, seed)
    assert graphs.rows == (set() if fault in REFUSED else {1, 2, 5})
    copies = {graph["copies_inputs"] for graph in graphs.report["graphs"]}
    assert copies == (set() if fault in REFUSED else {fault in COPIES})


def test_one_graph_serves_all_sessions(model: Any) -> None:
    graphs = model()
    sessions = [Session([float(i), 1.0, -2.0, 3.5]) for i in range(6)]
    for turn in range(4):
        for session in sessions:
            session.step(graphs, 3, turn)
    calls, launches, recordings = graphs.counted
    assert (calls, launches, recordings) == (2, 24 + 1, 1)  # a first run, a recorded one, and a launch to compare
    assert [graph["copies_inputs"] for graph in graphs.report["graphs"]] == [False]


Steps = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 2, 7]), st.integers(0, 5), st.booleans()), max_size=40
)


@settings(max_examples=25, deadline=None)
@given(steps=Steps, fault=st.sampled_from(["", "", "cannot move", "one stays", "overlooked write", "wrong"]))
def test_interleaved_sessions_have_the_bits_of_direct_runs(steps: list[Any], fault: str) -> None:
    """Of four sessions, two of which lie where a graph cannot use them; some calls fail."""
    with models() as make:
        graphs = make(fault, with_state=True)
        sessions = [Session([float(i), 1.0, -2.0, 3.5], apart=16 * (i % 2)) for i in range(4)]
        for number, rows, seed, fails in steps:
            session = sessions[number]
            if fails and not rows:
                # Broken, as of a graph or not: another takes its place.
                x, ids = inputs(2, seed)
                if not graphs.rows:
                    with pytest.raises(RuntimeError, match="99 is out of range"):
                        graphs(x, torch.full_like(ids, 99), session.h, session.c, session.b)
                sessions[number] = Session()
            else:
                session.step(graphs, rows, seed)
            for other in sessions:
                other.check()


def test_a_first_call_that_fails_writes_only_what_the_code_wrote(model: Any) -> None:
    """The attempt at a graph runs on copies, so that the state is what one direct run leaves."""
    graphs, session = model(), Session()
    x, ids = inputs(2)
    with pytest.raises(RuntimeError, match="99 is out of range"):
        graphs(x, torch.full_like(ids, 99), session.h, session.c, session.b)
    assert torch.equal(session.h, torch.tensor(HIDDEN) + x[0])
    assert session.c.item() == 0
    Session().step(graphs, 2)
    assert graphs.rows == {2}


def test_a_launch_that_fails_is_said(model: Any) -> None:
    graphs, session = model(), Session()
    session.step(graphs, 2)
    graphs.set_fault("fails")
    with pytest.raises(RuntimeError, match="the driver fails"):
        session.step(graphs, 2)
    session.check()


@pytest.mark.parametrize("fault", ["", "cannot move", "one stays"])
def test_capture_gives_back_inputs_and_no_state(model: Any, fault: str) -> None:
    graphs, session = model(fault, on_first_use=False), Session()
    session.step(graphs, 3)
    assert graphs.rows == set()  # only what is asked for is captured
    state = [tensor.to("meta") for tensor in (session.h, session.c, session.b)]
    own = graphs.capture(*inputs(3), *state)
    assert [list(tensor.shape) for tensor in own] == [[3, 4], [3]]
    for seed in range(3):
        x, ids = inputs(3, seed)
        own[0].copy_(x)
        own[1].copy_(ids)
        y, n = graphs(*own, session.h, session.c, session.b)
        assert torch.equal(y, x * 2 + 1 + session.expected_h + session.b)
        assert torch.equal(n, ids + 1 + session.expected_c)
        session.expected_h += x[0]
        session.expected_c += 3
        session.check()
    assert graphs.rows == {3}
    again = graphs.capture(*inputs(3), *state)
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in own]


def test_a_model_with_other_weights_captures_the_same(model: Any) -> None:
    graphs, other, session = model(on_first_use=False), model(on_first_use=False), Session()
    for rows in (2, 3):
        graphs.capture(*inputs(rows), session.h, session.c, session.b)
    session.check()
    other.capture_as(graphs)
    session.step(graphs, 3)
    session.step(other, 3)
    assert other.rows == graphs.rows == {2, 3}
    assert other.counted[1] == 2 + 1


# --- memory that is shared --------------------------------------------------------------------------------------------


def test_what_is_written_shares_no_memory(model: Any) -> None:
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
                graphs(*arguments)
            assert all(map(torch.equal, arguments, before))
    memory[:4] = torch.tensor(HIDDEN)
    session.h = memory[:4]
    session.b = memory[4:8].copy_(session.b)  # side by side is apart
    session.step(graphs, 4)


def test_inputs_that_are_only_read_may_be_one(model: Any) -> None:
    graphs, session = model(), Session()
    x, ids = inputs(1)
    x[0] = session.b
    y, _ = graphs(x, ids, session.h, session.c, x[0])
    assert torch.equal(y, x * 2 + 1 + session.expected_h + x)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_with_a_session_each(model: Any) -> None:
    graphs = model()

    def talk(number: int) -> None:
        session = Session([float(number), 1.0, -2.0, 3.5], apart=8 * (number % 2))
        for turn in range(60):
            session.step(graphs, 1 + (number + turn) % 5, turn)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(talk, number) for number in range(8)]:
            done.result()
    assert graphs.rows == {1, 2, 3, 4, 5}
