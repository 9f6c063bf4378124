"""Turns the bytes of requests into tensors and tensors into the bytes of answers, without copies where it can be."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from exportkit.serve.protocol.inference import InputTensor

# torch warns once in a process of memory that is read-only. Nobody writes inputs, so the warning is used up here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def tensor_of(given: InputTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor over the bytes of an input, which it keeps alive. `dtype` is that of the input's datatype."""
    if not given.data.nbytes:
        return torch.empty(given.shape, dtype=dtype)
    if dtype is torch.bool:  # torch takes a byte of 2 for neither true nor false
        return torch.frombuffer(given.data, dtype=torch.uint8).ne(0).view(given.shape)
    content = torch.frombuffer(given.data, dtype=dtype)
    if content.data_ptr() % dtype.itemsize:  # in shared memory, where the client chose the place
        content = content.clone()
    return content.view(given.shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, which they keep alive."""
    if not tensor.numel():
        return memoryview(b"")
    if tensor.dtype is torch.bfloat16:  # which NumPy does not have
        tensor = tensor.view(torch.int16)
    # By NumPy, whose views keep the interpreter's lock: after each view of torch's a thread would wait for it.
    return tensor.numpy().reshape(-1).view(np.uint8).data
