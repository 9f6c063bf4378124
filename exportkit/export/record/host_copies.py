"""The elements of tensors as bytes on the host, where they are hashed and written. Each is copied there once."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from exportkit.package.consistency import STATE_DIR


def elements(tensor: torch.Tensor) -> memoryview:
    """Returns a dense tensor's elements in the order of memory, as bytes. A tensor on the CPU is not copied."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().cpu().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def initial_record(tensor: torch.Tensor) -> tuple[str | None, memoryview]:
    """Returns the record of what a state begins with, and its content. None: zeros, which have no record."""
    content = elements(tensor)
    if not len(content) or not torch.frombuffer(content, dtype=torch.uint8).any():
        return None, content
    return f"{STATE_DIR}/{hashlib.sha256(content).hexdigest()}", content


class HostCopies:
    """Copies of a GPU's tensors, which stay until all that needs them is done: a digest, and the package."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Tensor, memoryview]] = {}

    def elements(self, tensor: torch.Tensor) -> memoryview:
        """Returns what the function of this name does. The tensor must not change afterwards."""
        if tensor.device.type == "cpu":
            return elements(tensor)
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in self._known:
            self._known[key] = tensor, elements(tensor)  # the tensor stays: another one could get its address
        return self._known[key][1]

    def clear(self) -> None:
        """Forgets the copies, where nothing needs them any more."""
        self._known.clear()
