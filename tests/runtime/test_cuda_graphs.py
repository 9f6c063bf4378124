"""CUDA graphs answer as calls do, whatever the sizes, the stream, the thread and the weights."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import exportkit
from exportkit.arr_coc import register
from exportkit.errors import HostError, ModelClosedError, ModelRunError, UsageError
from exportkit.runtime.graphs import CudaGraph, empty_inputs, graph_report
from exportkit.runtime.loader import load
from exportkit.runtime.native import NativeRunner
from tests.artifacts import artifact
from tests.runtime.fine_tunes import state


def mixed_inputs(batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + batch)
    return torch.randn(batch, 8, generator=draw).cuda(), torch.randint(0, 9, (batch,), generator=draw).cuda()


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# --- without a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolate", [False, True])
def test_a_model_on_the_cpu_has_no_graphs(isolate: bool):
    with pytest.raises(UsageError, match="for the CPU"):
        exportkit.load(artifact("weighted"), "cpu", cuda_graphs=True, isolate=isolate)
    with exportkit.load(artifact("weighted"), "cpu", isolate=isolate) as model:
        with pytest.raises(UsageError, match="without CUDA graphs"):
            model.capture(batch=3)
        with pytest.raises(UsageError, match="without CUDA graphs"):
            _ = model.cuda_graphs
    with pytest.raises(ModelClosedError):
        model.capture(batch=3)


@pytest.mark.parametrize("wrong", ["yes", 1, None, {"batch": 1}, [3], ["batch"]])
def test_what_is_neither_a_truth_nor_a_list_of_sizes_is_refused(wrong: Any):
    with pytest.raises(UsageError, match=r"cuda_graphs must be True, False or a list of sizes, got"):
        exportkit.load(artifact("weighted"), "cpu", cuda_graphs=wrong)


def test_sizes_must_be_those_of_the_package():
    with exportkit.load(artifact("weighted"), "cpu") as model:
        call = model.manifest.call
    sizes = {dimension.name: dimension.max for dimension in call.dimensions}
    shapes = [list(tensor.shape) for tensor in empty_inputs(call, sizes, torch.device("meta"))]
    said = f'{{"memory": 7, "graphs": [{{"shapes": {shapes}, "uses": 3, "copies_inputs": false}}], "refused": []}}'
    report = graph_report({"forward": said, "other": said}, {"forward": call.inputs, "other": call.inputs})
    graphs = tuple(CudaGraph(method, sizes, 3, False) for method in ("forward", "other"))
    assert (report.memory, report.graphs, report.refused) == (14, graphs, ())
    name = call.dimensions[0].name
    for wrong in ({name: 10**9}, {name: 1.0}, {name: True}, {name: None}):
        with pytest.raises(UsageError, match=f"{name} must be from"):
            empty_inputs(call, sizes | wrong, torch.device("meta"))
    with pytest.raises(UsageError, match="no dimension depth"):
        empty_inputs(call, sizes | {"depth": 1}, torch.device("meta"))


def test_a_swap_whose_graphs_cannot_be_made_leaves_the_old_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "cpp")
    x = torch.randn(3, 16)
    again = torch.ops.exportkit.capture_as.default
    monkeypatch.setattr(NativeRunner, "capture_as", lambda self, other: again(self._handle, other._handle))
    with exportkit.load(artifact("weighted"), "cpu") as model:
        before = model(x)
        with pytest.raises(
            ModelRunError, match="graphs cannot be made with the new weights: the model was loaded without"
        ):
            model.swap_weights(state(1))
        assert torch.equal(model(x), before)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[exportkit.Model]:
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "cpp")
    with exportkit.load(artifact("mixed-cuda"), "cuda", cuda_graphs=True) as model:
        yield model


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[exportkit.Model]:
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "cpp")
    with exportkit.load(artifact("mixed-cuda"), "cuda") as model:
        yield model


@pytest.mark.cuda
def test_answers_have_the_same_bits_and_stay_valid(graphs: exportkit.Model, plain: exportkit.Model):
    calls = [mixed_inputs(batch, seed) for seed in range(3) for batch in (1, 3, 64, 256)]
    answers = [graphs(*inputs) for inputs in calls]
    for inputs, answer in zip(calls, answers):
        assert same(answer, plain(*inputs))
    assert {graph.sizes["batch"] for graph in graphs.cuda_graphs.graphs} == {1, 3, 64, 256}
    assert all(graph.uses == 3 for graph in graphs.cuda_graphs.graphs)
    assert graphs.cuda_graphs.memory > 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["given-cuda", "triton-cuda", "weighted-cuda"])
def test_real_models_have_the_same_bits(name: str):
    register()
    with (
        exportkit.load(artifact(name), "cuda") as plain,
        exportkit.load(artifact(name), "cuda", cuda_graphs=True) as model,
    ):
        for case in plain.cases:
            expected = torch.utils._pytree.tree_leaves(plain(*case.args, **case.kwargs))
            for _ in range(3):
                answer = torch.utils._pytree.tree_leaves(model(*case.args, **case.kwargs))
                assert same(tuple(answer), tuple(expected))
        assert [graph.copies_inputs for graph in model.cuda_graphs.graphs] == [False] * len(model.cuda_graphs.graphs)
        assert model.cuda_graphs.graphs
        assert not model.cuda_graphs.refused


@pytest.mark.cuda
def test_inputs_are_read_where_they_are_however_they_lie():
    """At any address, and of any stride: what is not laid out as the graph reads it is copied before."""
    x = torch.randn(64, 16, device="cuda")
    memory = torch.empty(4096, device="cuda")
    with (
        exportkit.load(artifact("weighted-cuda"), "cuda") as plain,
        exportkit.load(artifact("weighted-cuda"), "cuda", cuda_graphs=[{"batch": 64}]) as model,
    ):
        assert not model.cuda_graphs.graphs[0].copies_inputs
        expected = plain(x)
        for offset in (0, 1, 2, 4, 64, 65):
            view = memory[offset : offset + x.numel()].view(64, 16).copy_(x)
            assert torch.equal(model(view), expected)
        assert torch.equal(model(x.t().contiguous().t()), expected)
        kept = [model(x + turn) for turn in range(4)]  # each input is freed, and its memory used again
        assert all(torch.equal(answer, plain(x + turn)) for turn, answer in enumerate(kept))


@pytest.mark.cuda
def test_an_answer_that_is_an_input_is_the_callers_own(graphs: exportkit.Model):
    x, ids = mixed_inputs(4, 0)
    kept = graphs(x, ids)[4]
    x.zero_()
    graphs(*mixed_inputs(4, 1))
    assert torch.equal(kept, mixed_inputs(4, 0)[0])


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "reason"), [("selects-cuda", "waiting for the GPU"), ("random-cuda", "cannot repeat")]
)
def test_what_cannot_be_a_graph_runs_without_one(name: str, reason: str):
    with exportkit.load(artifact(name), "cuda", cuda_graphs=True) as model:
        x = torch.randn(5, 8, device="cuda")
        for _ in range(3):
            y = model(x)
        if name == "selects-cuda":
            assert torch.equal(y, x[x.sum(-1) > 0] * 2)
        else:
            assert ((y - x) >= 0).all()
            assert not torch.equal(y, model(x))
        (refused,) = model.cuda_graphs.refused
        assert refused.sizes == {"batch": 5}
        assert reason in refused.reason
        with pytest.raises(ModelRunError, match=f"batch=5 cannot be a CUDA graph: .*{reason}"):
            model.capture(batch=5)
        torch.zeros(3, device="cuda").add_(1)  # no error is left over for it
        torch.cuda.synchronize()


@pytest.mark.cuda
def test_memory_that_streams_free_is_used_again_after_a_refusal():
    """torch puts off what was freed while a capture lasts: one that never ends would keep it for ever."""
    with exportkit.load(artifact("selects-cuda"), "cuda", cuda_graphs=True) as model:
        model(torch.randn(5, 8, device="cuda"))
    stream = torch.cuda.Stream()
    before = torch.cuda.memory_reserved()
    for _ in range(50):
        memory = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(stream):
            memory[0] = 1
        memory.record_stream(stream)
        del memory
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before <= 3 * (64 << 20)


@pytest.mark.cuda
def test_streams_wait_for_one_another(graphs: exportkit.Model, plain: exportkit.Model):
    inputs = [mixed_inputs(256, seed) for seed in range(8)]
    expected = [plain(*each) for each in inputs]
    graphs(*inputs[0])
    torch.cuda.synchronize()
    answers = []
    for each in inputs:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # cycles: without waiting, a later stream's call would come first
            answers.append(graphs(*each))
    torch.cuda.synchronize()
    assert all(map(same, answers, expected))


@pytest.mark.cuda
def test_models_that_run_at_the_same_time_do_not_share_the_memory_of_cublas():
    xs = [torch.randn(batch, 8192, device="cuda") for batch in (1, 3, 16)]
    with exportkit.load(artifact("products-cuda"), "cuda") as plain:
        known = [plain(x) for x in xs]

    def wrong(model: exportkit.Model) -> int:
        stream, count = torch.cuda.Stream(), 0
        with torch.cuda.stream(stream):
            for _ in range(200):
                answers = [model(x) for x in xs]
                stream.synchronize()
                count += sum(not torch.equal(*each) for each in zip(answers, known))
        return count

    with ExitStack() as stack:
        models = [
            stack.enter_context(exportkit.load(artifact("products-cuda"), "cuda", cuda_graphs=True)) for _ in range(3)
        ]
        for model in models:
            assert all(map(torch.equal, [model(x) for x in xs], known))
            assert not model.cuda_graphs.refused
        torch.cuda.synchronize()
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(wrong, models)) == [0, 0, 0]


@pytest.mark.cuda
def test_torch_may_free_the_memory_of_cublas():
    """torch.compile does, for each CUDA graph of its own."""
    x = torch.randn(3, 8192, device="cuda")
    with exportkit.load(artifact("products-cuda"), "cuda", cuda_graphs=True) as model:
        known = [model(x) for _ in range(2)][-1].clone()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((4 << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(64)]
        for _ in range(50):
            assert torch.equal(model(x), known)
        assert model(torch.cat([x, x])).shape == (6, 128)  # graphs of other sizes are still made
        assert not model.cuda_graphs.refused
        assert all((other == 7).all() for other in others)


@pytest.mark.cuda
def test_threads_with_mixed_sizes_while_weights_are_swapped():
    batches = (1, 2, 3, 7, 16, 33)
    xs = {batch: torch.randn(batch, 16, device="cuda") for batch in batches}
    with exportkit.load(artifact("weighted-cuda"), "cuda") as plain:
        known = {}
        for seed in (1, 2):
            plain.swap_weights(state(seed))
            known[seed] = {batch: plain(x) for batch, x in xs.items()}
    with exportkit.load(artifact("weighted-cuda"), "cuda", cuda_graphs=[{"batch": 2}]) as model:
        _hammer(model, xs, known)
        assert [graph.sizes for graph in model.cuda_graphs.graphs] == [{"batch": 2}]
    with exportkit.load(artifact("weighted-cuda"), "cuda", cuda_graphs=True) as model:
        _hammer(model, xs, known)
        assert not model.cuda_graphs.refused


def _hammer(
    model: exportkit.Model, xs: dict[int, torch.Tensor], known: dict[int, dict[int, torch.Tensor]], seconds: float = 3.0
) -> None:
    """Calls from 16 threads, each on a stream of its own, while weights are swapped. Every answer is of one of them."""
    model.swap_weights(state(1))
    stop = threading.Event()

    def call(seed: int) -> int:
        draw, count = random.Random(seed), 0
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                batch = draw.choice(list(xs))
                answer = model(xs[batch])
                stream.synchronize()
                assert any(torch.equal(answer, answers[batch]) for answers in known.values())
                count += 1
        return count

    torch.cuda.synchronize()
    with ThreadPoolExecutor(16) as pool:
        callers = [pool.submit(call, seed) for seed in range(16)]
        for turn in range(int(seconds * 10)):
            model.swap_weights(state(1 + turn % 2))
            stop.wait(0.1)
            if any(caller.done() for caller in callers):
                break
        stop.set()
        assert min(caller.result() for caller in callers) > 0


@pytest.mark.cuda
def test_memory_stays_the_same_over_replays_captures_and_swaps():
    x = {batch: torch.randn(batch, 16, device="cuda") for batch in range(1, 65)}

    def rounds(model: exportkit.Model, turns: int) -> int:
        for turn in range(turns):
            model.swap_weights(state(1 + turn % 2))
            for batch in range(1, 21):
                model(x[batch])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    with exportkit.load(artifact("weighted-cuda"), "cuda", cuda_graphs=True) as model:
        first = rounds(model, 3)
        assert first - rounds(model, 10) < 16 << 20  # 200 captures
        model(x[64])
        free = torch.cuda.mem_get_info()[0]
        for _ in range(10_000):
            model(x[64])
        torch.cuda.synchronize()
        assert free - torch.cuda.mem_get_info()[0] <= 2 << 20


@pytest.mark.cuda
def test_graphs_need_the_cpp_runtime(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "python")
    with pytest.raises(HostError, match="EXPORTKIT_RUNTIME is python"):
        load(artifact("mixed-cuda"), "cuda", cuda_graphs=True)


@pytest.mark.cuda
def test_a_worker_process_has_graphs_too(plain: exportkit.Model):
    with exportkit.load(artifact("mixed-cuda"), "cuda", isolate=True, cuda_graphs=[{"batch": 3}]) as model:
        inputs = mixed_inputs(3, 0)
        assert same(model(*inputs), plain(*inputs))
        assert [graph.sizes for graph in model.cuda_graphs.graphs] == [{"batch": 3}]
        assert all(tensor.shape[0] == 4 for tensor in model.capture(batch=4).values())
        assert [graph.sizes for graph in model.cuda_graphs.graphs] == [{"batch": 3}, {"batch": 4}]
        inputs = mixed_inputs(4, 1)
        assert same(model(*inputs), plain(*inputs))
