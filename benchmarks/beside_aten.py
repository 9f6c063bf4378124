"""Our CPU kernels beside ATen's for the same work, both called through the dispatcher, where a row has left the caches.

    python benchmarks/beside_aten.py

What the rows of `exportkit bench` have besides, gradients above all, is the way to the kernel: see call_cost.py.

The calls take turns in orders drawn at random, each on the next of as many sets of inputs as no third-level cache
holds. Gradients share what comes from above, as in a backward pass, where it was just made.

Prints a Markdown table of microseconds, medians. On a busy machine the numbers say little: look at `uptime` first.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from exportkit.arr_coc import ops
from exportkit.bench.runs import describe

Call = Callable[..., object]
aten = torch.ops.aten
_HELD = 64 << 20  # bytes of inputs


def pairs(rows: int, width: int) -> Iterator[tuple[str, Call, Call, Callable[[], tuple[Tensor, ...]]]]:
    """(name, ours, ATen's, a set of inputs)."""

    def normal() -> Tensor:
        return torch.randn(rows, width)

    upstream, weight, bias = normal(), torch.randn(width), torch.randn(width)

    def normalised() -> tuple[Tensor, ...]:
        x = normal()
        return upstream, x, *torch.ops.arr_coc.fused_layer_norm(x, weight, bias)[1:]

    yield "relu", ops.relu, aten.relu.default, lambda: (normal(),)
    yield "add_out", ops.add_out, lambda a, b, out: torch.add(a, b, out=out), lambda: (normal(), normal(), normal())
    half = torch.tensor(0.5)
    yield (
        "muladd", lambda a, b: ops.muladd(a, b, 0.5), lambda a, b: aten.addcmul.default(half, a, b),
        lambda: (normal(), normal()),
    )  # fmt: skip
    yield "softmax", ops.softmax, lambda x: aten._softmax.default(x, -1, False), lambda: (normal(),)
    yield (
        "fused_layer_norm", lambda x: ops.fused_layer_norm(x, weight, bias),
        lambda x: aten.native_layer_norm.default(x, [width], weight, bias, 1e-5), lambda: (normal(),),
    )  # fmt: skip
    yield (
        "reduce_sum dim 0",
        lambda x: ops.reduce_sum(x, 0),
        lambda x: aten.sum.dim_IntList(x, [0]),
        lambda: (normal(),),
    )
    yield (
        "reduce_sum dim 1",
        lambda x: ops.reduce_sum(x, 1),
        lambda x: aten.sum.dim_IntList(x, [1]),
        lambda: (normal(),),
    )
    yield (
        "relu, gradient", ops.relu_grad, lambda g, y: aten.threshold_backward.default(g, y, 0),
        lambda: (upstream, normal().relu()),
    )  # fmt: skip
    yield (
        "muladd, gradient", lambda g, a, b: ops.muladd_grad(g, a, b, True, True), lambda g, a, b: (g * b, g * a),
        lambda: (upstream, normal(), normal()),
    )  # fmt: skip
    yield (
        "softmax, gradient", ops.softmax_grad,
        lambda g, y: aten._softmax_backward_data.default(g, y, -1, torch.float32),
        lambda: (upstream, normal().softmax(-1)),
    )  # fmt: skip
    yield (
        "fused_layer_norm, gradient",
        lambda g, x, m, r: ops.fused_layer_norm_grad(g, x, weight, m, r, True, True, True),
        lambda g, x, m, r: aten.native_layer_norm_backward.default(
            g, x, [width], m[:, None], r[:, None], weight, bias, [True] * 3
        ),
        normalised,
    )  # fmt: skip


def medians(calls: list[Call], draw: Callable[[], tuple[Tensor, ...]], seconds: float) -> list[float]:
    """Microseconds of each."""
    first = draw()
    count = max(3, -(-_HELD // sum(tensor.nbytes for tensor in first)))
    inputs = itertools.cycle([first, *(draw() for _ in range(count - 1))])
    found: list[list[float]] = [[] for _ in calls]
    order, turns = list(range(len(calls))), random.Random(0)
    for call in calls:
        call(*first)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        turns.shuffle(order)
        for which in order:
            args = next(inputs)
            start = time.perf_counter()
            calls[which](*args)
            found[which].append((time.perf_counter() - start) * 1e6)
    return [statistics.median(times) for times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = describe(torch.device("cpu"))
    print(f"{machine.device}, load {machine.load}; torch {torch.__version__}\n")
    print("| kernel | size | ours | ATen's | ours / ATen's |\n| --- | --- | ---: | ---: | ---: |")
    for rows, width in ((1024, 768), (4096, 1024)):
        for name, ours, atens, draw in pairs(rows, width):
            with torch.no_grad():
                a, b = medians([ours, atens], draw, options.seconds)
            print(f"| {name} | {rows}x{width} | {a:.0f} | {b:.0f} | {a / b:.2f} |", flush=True)


if __name__ == "__main__":
    main()
