"""A package that is called with the bytes of its inputs, as the other engines' applications call it.

    python -m benchmarks.serve.peers.called model.pt2 --sizes batch=1,gh=32,gw=32 --max-batch 64

calls it without an engine, and prints the seconds of a call for each number of rows, as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import exportkit
from benchmarks.serve.workload import Workload, workload
from exportkit.bench.steps import parse_sizes
from exportkit.runtime.model import Model
from exportkit.serve.engine.checked_request import bytes_of
from exportkit.serve.engine.model_replica import arguments_of, tensors_in
from exportkit.serve.process_settings import keep_freed_memory

_COPIES = 8  # of the inputs, which take turns as requests do: caches hold no more of them than in use


@dataclass(frozen=True)
class Options:
    """What an engine serves, and how."""

    package: Path
    sizes: str
    port: int
    device: str
    max_batch: int
    seconds: float
    cuda_graphs: bool

    @staticmethod
    def parse(description: str | None) -> Options:
        """Reads the command line, and gives torch as many threads as the process has cores."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("package", type=Path)
        parser.add_argument("--sizes", required=True, help="each dimension, such as batch=1,gh=32,gw=32")
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument("--device", default="cpu")
        parser.add_argument("--max-batch", type=int, default=1)
        parser.add_argument("--seconds", type=float, default=2.0, help="for each number of rows, without an engine")
        parser.add_argument("--cuda-graphs", action="store_true")
        return Options(**vars(parser.parse_args()))


class Called:
    """A package that is called with the bytes of its inputs.

    Attributes:
        request: What a request looks like.
        model: The package, loaded.
    """

    def __init__(self, options: Options) -> None:
        """Loads the package."""
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.request: Workload = workload(options.package, options.sizes)
        self.model: Model = exportkit.load(options.package, device=options.device, cuda_graphs=options.cuda_graphs)
        call = self.model.manifest.call
        self._arguments = arguments_of(call)
        stateful = self.model.manifest.method(None).state
        self._callee = self.model.session(**parse_sizes(options.sizes, call)) if stateful else self.model

    def inputs(self, body: bytes) -> list[torch.Tensor]:
        """Returns the tensors of a body. They are views of it."""
        tensors, start = [], 0
        memory = bytearray(body)
        for described, shape, data in zip(self.model.manifest.call.inputs, self.request.shapes, self.request.arrays):
            dtype = getattr(torch, described.dtype)
            tensors.append(torch.frombuffer(memory, dtype=dtype, count=len(data) // dtype.itemsize, offset=start))
            tensors[-1] = tensors[-1].view(*shape)
            start += len(data)
        return tensors

    def outputs(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Calls the model. Inputs and outputs are in the CPU's memory."""
        args, kwargs = self._arguments([tensor.to(self.model.device) for tensor in inputs])
        return [tensor.cpu() for tensor in tensors_in(self._callee(*args, **kwargs))]

    def together(self, requests: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Calls the model with the rows of several requests."""
        outputs = self.outputs([torch.cat(parts) for parts in zip(*requests)])
        return [list(part) for part in zip(*(output.split(self.request.rows) for output in outputs))]


def answer(outputs: list[torch.Tensor]) -> bytes:
    """Returns the bytes of outputs."""
    return b"".join(bytes_of(tensor.contiguous()) for tensor in outputs)


def main() -> None:
    options = Options.parse(__doc__)
    keep_freed_memory()  # as `exportkit serve` does
    called = Called(options)
    one, seconds, rows = called.inputs(b"".join(called.request.arrays)), {}, called.request.rows
    while rows <= options.max_batch:
        count = rows // called.request.rows
        turns = itertools.cycle([[torch.cat([tensor] * count) for tensor in one] for _ in range(_COPIES)])
        times: list[float] = []
        called.outputs(next(turns))
        while sum(times) < options.seconds or len(times) < 5:
            inputs = next(turns)
            start = time.perf_counter()
            called.outputs(inputs)
            times.append(time.perf_counter() - start)
        seconds[rows] = statistics.median(times)
        rows *= 2
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
