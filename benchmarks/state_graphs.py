"""A method with state on a GPU: called in a session, as a CUDA graph, and that graph alone.

    python -m benchmarks.state_graphs model.pt2 --method step --size batch=1 --size batch=8

"the graph alone" is a replay on one session's state, without new inputs and outputs; "in turn" are two sessions that
one graph serves alternately. Microseconds of a call that follows another, by CUDA events: the median of seven rounds.
"host" is what the calling thread takes for a call with CUDA graphs, and for the graph alone. The method must bear any
number of calls with inputs of zeros. Prints a Markdown table, whether all bits are equal, and the memory that loading
takes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import exportkit
from benchmarks.cuda_graphs import microseconds
from exportkit.bench.steps import parse_sizes
from exportkit.runtime.graphs import empty_inputs
from exportkit.serve.engine.model_replica import arguments_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--method", required=True)
    parser.add_argument("--size", dest="sizes", action="append", required=True, help="such as batch=8")
    options = parser.parse_args()
    exportkit.load(options.package, "cuda").close()  # what CUDA and kernels take stays
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with exportkit.load(options.package, "cuda", runners=2) as plain:
        loaded = before - torch.cuda.mem_get_info()[0]
        with (
            exportkit.load(options.package, "cuda", cuda_graphs=True) as graphs,
            exportkit.load(options.package, "cuda", cuda_graphs=[]) as captured,
        ):
            print("| size | a call | with CUDA graphs | in turn | the graph alone | of that | host | equal bits |")
            print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
            for size in options.sizes:
                print(_row(plain, graphs, captured, options.method, size))
            for refused in graphs.cuda_graphs.refused:
                print(f"refused: {refused}")
        weights = sum(
            torch.empty(0, dtype=getattr(torch, each.dtype)).itemsize * torch.Size(each.shape).numel()
            for each in plain.manifest.weights
            if each.record
        )
        print(f"\nweights {weights / 1e6:.1f} MB; loading took {loaded / 1e6:.1f} MB of the GPU's memory")


def _row(plain: exportkit.Model, graphs: exportkit.Model, captured: exportkit.Model, method: str, size: str) -> str:
    call = plain.methods[method].call
    sizes = parse_sizes(size, call)
    args, kwargs = arguments_of(call)([tensor.zero_() for tensor in empty_inputs(call, sizes, plain.device)])
    axes = {axis.dimension for each in plain.manifest.state for axis in each.shape if not isinstance(axis, int)}
    rows = {name: value for name, value in sizes.items() if name in axes}
    sessions = [model.session(**rows) for model in (plain, graphs, graphs, captured)]
    calls = [partial(getattr(session, method), *args, **kwargs) for session in sessions]
    answers = [[tree_leaves(call()) for _ in range(3)] for call in calls[:2]]
    equal = all(map(torch.equal, itertools.chain(*answers[0]), itertools.chain(*answers[1])))
    states = [session.state for session in sessions[:2]]
    equal &= all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    alone = _captured(calls[3])
    turns = itertools.cycle(calls[1:3])
    called, replayed, bare = (microseconds(each) for each in (calls[0], calls[1], alone.replay))
    in_turn = microseconds(lambda: next(turns)())
    host = f"{_host_microseconds(calls[1]):.1f}, {_host_microseconds(alone.replay):.1f}"
    times = f"{called:.1f} | {replayed:.1f} | {in_turn:.1f} | {bare:.1f} | {replayed / bare:.2f} | {host}"
    return f"| {size} | {times} | {equal} |"


def _host_microseconds(call: Callable[[], object], count: int = 50) -> float:
    """Returns the time that the host takes for a call, while the GPU's queue has room."""
    rounds = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - begin) / count * 1e6)
    return statistics.median(rounds)


def _captured(call: Any) -> torch.cuda.CUDAGraph:
    """Returns a graph of the caller's, which a model loaded with `cuda_graphs` allows."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


if __name__ == "__main__":
    main()
