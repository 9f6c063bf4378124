"""CUDA graphs of models with state: any session is read and written where it is, once a call, with a call's bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.errors import InputError
from tests.artifacts import artifact
from tests.export.state_graph_models import WORDS, Decoder

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def cpp_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "cpp")


@pytest.fixture
def graphs() -> Iterator[exportkit.Model]:
    with exportkit.load(artifact("decoder-cuda"), "cuda", cuda_graphs=True) as model:
        yield model


@pytest.fixture
def plain() -> Iterator[exportkit.Model]:
    with exportkit.load(artifact("decoder-cuda"), "cuda") as model:
        yield model


def tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(seed)).cuda()


class Pair:
    """A session with graphs and one without, which must have the same bits after every call."""

    def __init__(self, graphs: exportkit.Model, plain: exportkit.Model, batch: int) -> None:
        self.batch = batch
        self.sessions = [graphs.session(batch=batch), plain.session(batch=batch)]

    def call(self, method: str, tokens: torch.Tensor) -> None:
        one, other = (getattr(session, method)(tokens) for session in self.sessions)
        assert torch.equal(one, other)

    def fork(self) -> Pair:
        other = object.__new__(Pair)
        other.batch, other.sessions = self.batch, [session.fork() for session in self.sessions]
        return other

    def check(self) -> None:
        one, other = (session.state for session in self.sessions)
        assert len(one) == 65
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_interleaved_sessions_have_the_bits_of_calls(graphs: exportkit.Model, plain: exportkit.Model) -> None:
    pairs = [Pair(graphs, plain, 1 + number % 2) for number in range(6)]
    for number, pair in enumerate(pairs):
        pair.call("prefill", tokens(number, pair.batch, 3 + number % 2))
    for turn in range(8):
        for number, pair in enumerate(pairs):
            pair.call("step", tokens(10 * turn + number, pair.batch))
            if turn == 3 and number < 2:
                pairs[4 + number] = pair.fork()
            if turn == 5 and number == 2:
                for session in pair.sessions:
                    session.reset()
                pair.check()
                pair.call("prefill", tokens(turn, pair.batch, 3))
    for pair in pairs:
        pair.check()
    used = graphs.cuda_graphs
    assert not used.refused
    assert not any(graph.copies_inputs for graph in used.graphs)
    assert len(used.graphs) == 2 * 2  # a prefill and a step of each batch, whatever the number of sessions


def test_threads_and_streams_with_a_session_each(graphs: exportkit.Model, plain: exportkit.Model) -> None:
    def talk(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            pair = Pair(graphs, plain, 1 + number % 3)
            pair.call("prefill", tokens(number, pair.batch, 4))
            for turn in range(20):
                pair.call("step", tokens(100 * number + turn, pair.batch))
            pair.check()
            stream.synchronize()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(talk, range(6)))


def test_sessions_go_on_while_weights_are_swapped(graphs: exportkit.Model, plain: exportkit.Model) -> None:
    pair = Pair(graphs, plain, 2)
    graphs.capture("step", batch=2)
    pair.call("prefill", tokens(0, 2, 4))
    for turn in range(3):
        torch.manual_seed(turn)
        weights = {name: torch.randn_like(tensor) / 16 for name, tensor in Decoder().named_parameters()}
        for model in (graphs, plain):
            model.swap_weights(weights)
        for step in range(3):
            pair.call("step", tokens(10 * turn + step, 2))
    pair.check()


def test_captured_inputs_are_used_with_any_session(graphs: exportkit.Model, plain: exportkit.Model) -> None:
    own = graphs.capture("step", batch=2)
    assert list(own) == ["token"]
    pairs = [Pair(graphs, plain, 2) for _ in range(2)]
    for turn in range(4):
        for pair in pairs:
            own["token"].copy_(tokens(turn, 2))
            pair.call("step", own["token"])
    for pair in pairs:
        pair.check()


def test_what_cannot_be_a_graph_writes_the_state_once() -> None:
    with exportkit.load(artifact("selects-state-cuda"), "cuda", cuda_graphs=True) as model:
        session, total = model.session(), torch.zeros(8, device="cuda")
        for seed in range(4):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).cuda()
            assert torch.equal(session(x), x[x.sum(-1) > 0] * 2)
            total += x.sum(0)
            torch.testing.assert_close(session.state["total"], total)
        assert len(model.cuda_graphs.refused) == 1


def test_written_inputs_are_written_wherever_they_lie() -> None:
    with exportkit.load(artifact("writes-cuda"), "cuda", cuda_graphs=True) as model:
        memory = torch.zeros(4096, device="cuda")
        for turn, offset in enumerate((0, 4, 64, 68, 128, 0, 4)):  # at 16 bytes, as the code needs it
            memory.zero_()
            total = memory[offset : offset + 40].view(5, 8).fill_(turn)
            x = torch.randn(5, 8, device="cuda")
            answer = model(x, total)
            assert torch.equal(total, x + turn)
            assert torch.equal(answer, (x + turn) * 2 + x)
            assert memory[:offset].eq(0).all()
            assert memory[offset + 40 :].eq(0).all()
        (graph,) = model.cuda_graphs.graphs
        assert not graph.copies_inputs
        with pytest.raises(InputError):
            model(x, x)


def test_a_session_in_a_callers_own_graph(graphs: exportkit.Model, plain: exportkit.Model) -> None:
    pair, token = Pair(graphs, plain, 2), tokens(0, 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pair.call("step", token)
    torch.cuda.synchronize()
    own = torch.cuda.CUDAGraph()
    with torch.cuda.graph(own, stream=stream):
        answer = pair.sessions[0].step(token)
    for seed in range(1, 4):
        token.copy_(tokens(seed, 2))
        own.replay()
        torch.cuda.synchronize()
        assert torch.equal(answer, pair.sessions[1].step(token))
    pair.check()


# --- memory -----------------------------------------------------------------------------------------------------------


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("runtime", ["cpp", "python"])
def test_weights_are_on_the_device_once(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORTKIT_RUNTIME", runtime)
    weights = sum(parameter.nbytes for parameter in Decoder().parameters())
    with exportkit.load(artifact("decoder-cuda"), "cuda") as model:  # kernels, and what CUDA and cuBLAS keep
        model.session(batch=2).step(tokens(0, 2))
    del model
    before = allocated()
    with exportkit.load(artifact("decoder-cuda"), "cuda", runners=3) as model:
        loaded = allocated() - before
        session = model.session(batch=2)
        session.step(tokens(0, 2))
        state = {name: torch.randn_like(tensor) for name, tensor in Decoder().named_parameters()}
        for _ in range(3):
            model.swap_weights(state)
            session.step(tokens(1, 2))
        swapped = allocated() - before
        session.close()
    del model, session
    assert weights <= loaded < 1.3 * weights
    assert swapped < 1.9 * weights  # with the session's state
    assert allocated() - before < 0.5 * weights


def test_memory_comes_back_with_graphs_and_sessions(tmp_path: Path) -> None:
    used = []
    for _ in range(5):
        with exportkit.load(artifact("decoder-cuda"), "cuda", cuda_graphs=True) as model:
            for batch in (1, 2):
                session = model.session(batch=batch)
                session.prefill(tokens(0, batch, 4))
                session.step(tokens(0, batch))
            session.save(tmp_path / "state.safetensors")
        del model, session
        used.append(allocated())
    assert used[-1] - used[1] < 8 << 20  # the first load takes what others have freed
