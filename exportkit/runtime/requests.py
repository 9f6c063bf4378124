"""Several requests in one call of a model, from the CPU's memory and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Answers(NamedTuple):
    """What a call answered to several requests: the outputs that were asked for, on the CPU and contiguous.

    The seconds are those to bring the inputs to the device, to wait there for a runner, to run, and to bring the
    outputs back.
    """

    outputs: list[torch.Tensor]
    input_seconds: float
    wait_seconds: float
    run_seconds: float
    output_seconds: float


class TriedRows(NamedTuple):
    """How many rows of several requests a call may have, as far as the recorded cases show; 0: each runs alone.

    `dimension` is the one of which each request brings a part; `reason`, why each runs alone; `bit_equal`, whether
    answers had the same bits, however requests were put together.
    """

    most: int
    dimension: str = ""
    reason: str = ""
    bit_equal: bool = True


def joined(requests: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the inputs of all requests, one after the other along axis 0. Those of one alone are not copied."""
    if len(requests) == 1:
        return list(requests[0])
    flat = [torch.cat([part.reshape(-1).view(torch.uint8) for part in parts]) for parts in zip(*requests)]
    return [  # by their bytes, because `cat` lacks some dtypes
        each.view(first.dtype).view(shape)
        for each, first, shape in zip(flat, requests[0], joined_shapes(requests), strict=True)
    ]


def joined_shapes(requests: Sequence[Sequence[torch.Tensor]]) -> list[tuple[int, ...]]:
    """Returns the shapes of what `joined` returns."""
    if len(requests) == 1:
        return [tuple(tensor.shape) for tensor in requests[0]]
    return [(sum(part.shape[0] for part in parts), *parts[0].shape[1:]) for parts in zip(*requests)]


def run_in_steps(
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    device: torch.device,
    requests: Sequence[Sequence[torch.Tensor]],
    outputs: Sequence[int],
) -> Answers:
    """Runs requests together without the C++ runtime. The thread waits for Python's lock after each step."""
    started = time.perf_counter()
    inputs = [tensor.to(device) for tensor in joined(requests)]
    moved = time.perf_counter()
    found = run(inputs)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    ran = time.perf_counter()
    answers = [found[output].cpu().contiguous() for output in outputs]
    return Answers(answers, moved - started, 0.0, ran - moved, time.perf_counter() - ran)


def use_own_stream(device: torch.device) -> None:
    """Gives this thread a CUDA stream, so that its calls run beside other threads'. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))
