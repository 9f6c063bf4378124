"""A package loaded, refused and called very often: memory stays as it is, on the host and on the GPU.

    python -m benchmarks.call_soak model.pt2 --device cuda --loads 300 --refused 100000 --calls 30000 [--cuda-graphs]

Each part runs for a tenth of its length first: allocators and caches grow. Then it runs as a whole.
Prints a line of JSON for each. The exit code is 1 if one left more behind than `--allowed` MiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import exportkit
from exportkit.errors import InputError
from exportkit.package.manifest import Call
from exportkit.runtime.graphs import empty_inputs
from exportkit.serve.engine.model_replica import arguments_of
from exportkit.sizes import plan_sizes

_MOST_BYTES = 64 << 20  # of the inputs of a call

Given = tuple[Any, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--loads", type=int, default=300)
    parser.add_argument("--refused", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=30_000)
    parser.add_argument("--sizes", type=int, default=24, help="different ones of the calls")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--allowed", type=float, default=8.0, metavar="MIB")
    options = parser.parse_args(arguments)

    def load() -> exportkit.Model:
        return exportkit.load(options.package, options.device, cuda_graphs=options.cuda_graphs)

    with load() as model:
        device, call = model.device, model.manifest.call
        given = _drawn(call, options.sizes, device)
        good = next(given_one for given_one in given if not _refused(model, given_one))

        def call_once(number: int) -> None:
            args, kwargs = given[number % len(given)]
            model(*args, **kwargs)

        def refuse(number: int) -> None:
            if not _refused(model, _spoilt(good, number)):
                raise SystemExit("inputs that are wrong were not refused")

        def open_and_close(number: int) -> None:
            with load() as other:
                other(*good[0], **good[1])

        random.Random(0).shuffle(given)
        parts: dict[str, tuple[Callable[[int], None], int]] = {
            "calls of changing sizes": (call_once, options.calls),
            "refused inputs": (refuse, options.refused),
            "loads and closes": (open_and_close, options.loads),
        }
        grown = [_run(name, work, count, device) for name, (work, count) in parts.items() if count]
    return int(max(grown, default=0.0) > options.allowed)


def _drawn(call: Call, count: int, device: torch.device) -> list[Given]:
    """Returns the inputs of calls of so many sizes."""
    found = []
    for sizes in plan_sizes(call, count, seed=0, max_bytes=_MOST_BYTES).sizes:
        drawn = empty_inputs(call, sizes, device)
        tensors = [each.normal_() if each.is_floating_point() else each.zero_() for each in drawn]
        found.append(arguments_of(call)(tensors))
    return found


def _spoilt(given: Given, number: int) -> Given:
    """Returns inputs of which the first is wrong, each time in another way."""
    wrong = (
        lambda tensor: tensor.to(torch.complex64),
        lambda tensor: tensor[None],
        lambda tensor: tensor.new_empty([0, *tensor.shape[1:]]),
        lambda tensor: None,
    )
    change: Callable[[Any], Any] = wrong[number % len(wrong)]
    args, kwargs = given
    if args:
        return [change(args[0]), *args[1:]], kwargs
    first = next(iter(kwargs))
    return args, {**kwargs, first: change(kwargs[first])}


def _refused(model: exportkit.Model, given: Given) -> bool:
    try:
        model(*given[0], **given[1])
    except InputError:
        return True
    return False


def _run(name: str, work: Callable[[int], None], count: int, device: torch.device) -> float:
    """Returns by how many MiB memory grew, where it grew more."""
    for number in range(max(count // 10, 1)):
        work(number)
    before, began = _used(device), time.perf_counter()
    for number in range(count):
        work(number)
    seconds = time.perf_counter() - began
    grown = {where: (now - before[where]) / 2**20 for where, now in _used(device).items()}
    print(json.dumps({"what": name, "count": count, "seconds": round(seconds, 1), "grown_mib": grown}), flush=True)
    return max(grown.values())


def _used(device: torch.device) -> dict[str, int]:
    """Returns this process's own memory, and the memory of its GPU that is used by all processes, in bytes."""
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    own = next(line.split()[1] for line in text.splitlines() if line.startswith("Private_Dirty:"))
    found = {"host": int(own) * 1024}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, size = torch.cuda.mem_get_info(device)
        found["device"] = size - free
    return found


if __name__ == "__main__":
    sys.exit(main())
