"""Turns the bytes of requests into tensors and tensors into the bytes of answers, without copies where it can be."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import torch

from exportkit.serve.protocol.inference import InputTensor

# torch warns once in a process of memory that is read-only. Nobody writes inputs, so the warning is used up here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


def tensor_of(given: InputTensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor over the bytes of an input, which it keeps alive. `dtype` is that of the input's datatype."""
    if not given.data.nbytes:
        return torch.empty(given.shape, dtype=dtype)
    array = np.frombuffer(given.data, _as_numpy(dtype)).reshape(given.shape)  # see `bytes_of`
    tensor = torch.from_numpy(array)
    if dtype is torch.bool:  # torch takes a byte of 2 for neither true nor false
        return tensor.ne(0)
    if tensor.data_ptr() % dtype.itemsize:  # in shared memory, where the client chose the place
        tensor = tensor.clone()
    return tensor.view(dtype) if dtype is torch.bfloat16 else tensor


@functools.cache
def _as_numpy(dtype: torch.dtype) -> np.dtype:
    """Returns the dtype by which NumPy handles the bytes of a tensor."""
    instead = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}
    return torch.empty(0, dtype=instead.get(dtype, dtype)).numpy().dtype


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, which they keep alive."""
    if not tensor.numel():
        return memoryview(b"")
    if tensor.dtype is torch.bfloat16:  # which NumPy does not have
        tensor = tensor.view(torch.int16)
    # By NumPy, whose views keep the interpreter's lock: after each view of torch's a thread would wait for it.
    return tensor.numpy().reshape(-1).view(np.uint8).data
