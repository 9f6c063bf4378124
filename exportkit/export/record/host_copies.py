"""The elements of tensors as bytes on the host, where they are hashed and written."""

from __future__ import annotations

import hashlib

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
