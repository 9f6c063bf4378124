"""What a call costs besides its kernel: an operator of 128 elements, beside torch's own ways to the same kernel.

    python benchmarks/call_cost.py

Forward, `torch.relu` (C++), `torch.ops.aten.relu` (ATen's kernel through the dispatcher, as Python calls every
operator) and ours (a wrapper, the dispatcher, the stable ABI). Backward, ATen's rule (C++), a rule in Python around
ATen's kernel, and ours (a rule in Python, since the stable ABI has none).

Each call follows other work, which is not timed: none; 6 or 32 MB read and written, as the others in a row of
`exportkit bench` do; or a compiled function besides. What a call needs of code and data has then left the caches.

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

Call = Callable[[], object]


class RuleInPython(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward.default(grad, *ctx.saved_tensors, 0)


def calls(x: Tensor) -> Iterator[tuple[str, Call]]:
    for name, function in {
        "torch.relu": torch.relu,
        "torch.ops.aten.relu": torch.ops.aten.relu.default,
        "exportkit.arr_coc.ops.relu": ops.relu,
    }.items():
        yield name, lambda function=function: function(x)


def gradients(x: Tensor) -> Iterator[tuple[str, Call]]:
    for name, function in {
        "gradient of torch.relu": torch.relu,
        "of a rule in Python, ATen's kernel": RuleInPython.apply,
        "of exportkit.arr_coc.ops.relu": ops.relu,
    }.items():
        leaf = x.clone().requires_grad_()
        output = function(leaf)
        yield name, lambda arguments=(output, leaf, x): torch.autograd.grad(*arguments, retain_graph=True)


def other_work() -> Iterator[tuple[str, Call]]:
    def moving(*shape: int) -> Call:
        tensors = itertools.cycle([torch.randn(shape) for _ in range(4)])
        return lambda: torch.mul(next(tensors), 1.0, out=next(tensors))

    few, many = moving(1024, 768), moving(4096, 1024)
    compiled, small = torch.compile(lambda x: torch.relu(x) - 1), torch.randn(1024, 768)
    yield "after nothing", lambda: None
    yield "after 6 MB", few
    yield "after 32 MB", many
    yield "after 6 MB and torch.compile", lambda: (few(), compiled(small))


def medians(timed: dict[str, Call], before: Call, rounds: int) -> dict[str, float]:
    """Microseconds; the calls take turns in orders drawn at random."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    order, turns = list(timed), random.Random(0)
    for _ in range(rounds):
        turns.shuffle(order)
        for name in order:
            before()
            start = time.perf_counter()
            timed[name]()
            found[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = describe(torch.device("cpu"))
    print(f"{machine.device}, load {machine.load}; torch {torch.__version__}\n")
    work = dict(other_work())
    x = torch.randn(8, 16)
    for timed, gradient in ((dict(calls(x)), False), (dict(gradients(x)), True)):
        print("| microseconds | " + " | ".join(timed) + " |")
        print("| --- |" + " ---: |" * len(timed))
        for what, before in work.items():
            with torch.set_grad_enabled(gradient):
                for call in (*timed.values(), before):
                    call()
                found = medians(timed, before, options.rounds)
            print(f"| {what} | " + " | ".join(f"{found[name]:.1f}" for name in timed) + " |", flush=True)
        print()


if __name__ == "__main__":
    main()
