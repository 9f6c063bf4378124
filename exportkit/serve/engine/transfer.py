"""Brings the inputs of a batch together where the model is, and its outputs back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}  # for older torch's `cat`


class Transfer(Protocol):
    """The way of one runner's batches to the model and back. Only that runner's thread uses it."""

    def on_stream(self) -> AbstractContextManager[Any]:
        """Returns the context in which the other methods and the model are called."""

    def join(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Returns the model's inputs: those of the requests, one after the other along axis 0."""

    def finish(self) -> None:
        """Waits until the model has run."""

    def back(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs on the CPU, contiguous."""


def transfer_to(device: torch.device) -> Transfer:
    """Returns the way to a device."""
    return CudaTransfer(device) if device.type == "cuda" else HostTransfer()


class HostTransfer:
    """The model is on the CPU. A request that runs alone is not copied."""

    def on_stream(self) -> AbstractContextManager[Any]:
        """Returns an empty context."""
        return nullcontext()

    def join(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Returns the model's inputs."""
        if len(requests) == 1:
            return list(requests[0])
        joined = []
        for parts in zip(*requests):
            dtype, shape = _kind(parts)
            joined.append(_joined(parts, torch.empty(shape, dtype=dtype, device=parts[0].device)))
        return joined

    def finish(self) -> None:
        """Does nothing: the call returns when the model has run."""

    def back(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs."""
        return [output.contiguous() for output in outputs]


class CudaTransfer:
    """The model is on a GPU. Copies go through pinned memory on a stream of this runner."""

    def __init__(self, device: torch.device) -> None:
        """Makes the stream. The pinned memory grows with the batches."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned: dict[int, torch.Tensor] = {}  # by the input's place

    def on_stream(self) -> AbstractContextManager[Any]:
        """Returns a context in which the stream is the current one."""
        return torch.cuda.stream(self._stream)

    def join(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Returns the model's inputs. The copy may still run."""
        joined = []
        for place, parts in enumerate(zip(*requests)):
            dtype, shape = _kind(parts)
            pinned = self._pinned_bytes(place, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            joined.append(_joined(parts, pinned).to(self._device, non_blocking=True))
        return joined

    def finish(self) -> None:
        """Waits for the stream."""
        self._stream.synchronize()

    def back(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs in pinned memory, which torch keeps for later answers."""
        answers = [torch.empty(output.shape, dtype=output.dtype, pin_memory=True) for output in outputs]
        for answer, output in zip(answers, outputs):
            answer.copy_(output, non_blocking=True)
        self._stream.synchronize()
        return answers

    def _pinned_bytes(self, place: int, size: int) -> torch.Tensor:
        """Returns pinned memory for an input. Each batch ends before the next writes here."""
        if place not in self._pinned or self._pinned[place].numel() < size:
            self._pinned[place] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._pinned[place][:size]


def _joined(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Writes contiguous tensors into `out`, one after the other along axis 0, and returns it. One may be a scalar."""
    if len(parts) == 1:
        return out.copy_(parts[0])
    if (signed := _SIGNED.get(out.dtype)) is not None:
        torch.cat([part.view(signed) for part in parts], out=out.view(signed))
        return out
    return torch.cat(list(parts), out=out)


def _kind(parts: Sequence[torch.Tensor]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns the dtype and the shape of tensors that are put together along axis 0."""
    shape = tuple(parts[0].shape)
    return parts[0].dtype, shape if len(parts) == 1 else (sum(part.shape[0] for part in parts), *shape[1:])
