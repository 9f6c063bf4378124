"""Brings the inputs of a batch together where the model is, and its outputs back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from exportkit.runtime.native import use_native

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
        return [_concatenated(parts) for parts in zip(*requests)]

    def finish(self) -> None:
        """Does nothing: the call returns when the model has run."""

    def back(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs."""
        return [output.contiguous() for output in outputs]


class CudaTransfer:
    """The model is on a GPU. Copies go on a stream of this runner.

    The C++ runtime copies all tensors in one call, through pinned memory: at each operation of torch, this thread would
    wait for the interpreter's lock, up to 0.1 ms while the event loop works.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._native = use_native()

    def on_stream(self) -> AbstractContextManager[Any]:
        """Returns a context in which the stream is the current one."""
        return torch.cuda.stream(self._stream)

    def join(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Returns the model's inputs. The copies may still run."""
        if not self._native:
            return [tensor.to(self._device) for tensor in HostTransfer().join(requests)]
        tensors = [tensor for request in requests for tensor in request]
        joined: list[torch.Tensor] = torch.ops.exportkit.join.default(tensors, len(requests), self._device)
        return joined

    def finish(self) -> None:
        """Waits for the stream."""
        self._stream.synchronize()

    def back(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs, in pinned memory, which torch keeps for later answers."""
        if not self._native:
            return [output.cpu().contiguous() for output in outputs]
        fetched: list[torch.Tensor] = torch.ops.exportkit.fetch.default(list(outputs))
        return fetched


def _concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = parts[0].dtype
    if (signed := _SIGNED.get(dtype)) is None:
        return torch.cat(list(parts))
    return torch.cat([part.view(signed) for part in parts]).view(dtype)
