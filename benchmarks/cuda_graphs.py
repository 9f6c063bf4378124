"""A package on a GPU called, as a CUDA graph, and that graph alone.

    python -m benchmarks.cuda_graphs model.pt2 --size batch=1,gh=28,gw=28 --size batch=8,gh=28,gw=28

"the graph alone" is a replay without new inputs and new outputs. Microseconds of a call that follows another, by CUDA
events: the median of seven rounds. Prints a Markdown table, and whether all bits are equal.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import exportkit
from exportkit.bench.steps import parse_sizes
from exportkit.runtime.graphs import empty_inputs
from exportkit.serve.engine.model_replica import arguments_of

_ROUNDS = 7
_SECONDS = 0.05  # of a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--size", dest="sizes", action="append", required=True, help="such as batch=8,gh=28,gw=28")
    options = parser.parse_args()
    print("| size | a call | with CUDA graphs | the graph alone | of that | equal bits |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    with (
        exportkit.load(options.package, "cuda") as plain,
        exportkit.load(options.package, "cuda", cuda_graphs=True) as graphs,
        exportkit.load(options.package, "cuda", cuda_graphs=[]) as captured,
    ):
        for size in options.sizes:
            args, kwargs = _inputs(plain, size)
            called, replayed = tree_leaves(plain(*args, **kwargs)), tree_leaves(graphs(*args, **kwargs))
            equal = all(map(torch.equal, called, replayed))
            alone = _captured(captured, args, kwargs)
            times = [microseconds(partial(model, *args, **kwargs)) for model in (plain, graphs)]
            bare = microseconds(alone.replay)
            print(f"| {size} | {times[0]:.1f} | {times[1]:.1f} | {bare:.1f} | {times[1] / bare:.2f} | {equal} |")


def _inputs(model: exportkit.Model, size: str) -> tuple[Any, Any]:
    call = model.manifest.call
    drawn = empty_inputs(call, parse_sizes(size, call), model.device)
    return arguments_of(call)([t.normal_() if t.is_floating_point() else t.zero_() for t in drawn])


def _captured(model: exportkit.Model, args: Any, kwargs: Any) -> torch.cuda.CUDAGraph:
    """Returns a graph of the caller's, which a model loaded with `cuda_graphs` allows."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(*args, **kwargs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        model(*args, **kwargs)
    return graph


def microseconds(call: Callable[[], object]) -> float:
    """Returns the time of a call that follows another."""
    once = _elapsed(call, 20) / 20
    count = max(10, int(_SECONDS * 1e6 / once))
    return statistics.median(_elapsed(call, count) / count for _ in range(_ROUNDS))


def _elapsed(call: Callable[[], object], count: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


if __name__ == "__main__":
    main()
