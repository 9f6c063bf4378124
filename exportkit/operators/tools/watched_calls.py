"""Sees each call of an operator from Python, before it is made."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from exportkit.operators.contract.call_code import ways_to_write
from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.sample import Sample

_ALIGNED = 64  # bytes: where torch's memory begins
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@contextlib.contextmanager
def watched_calls(operator: OpOverload, see: Callable[[Sample], AbstractContextManager[None]]) -> Iterator[None]:
    """Makes each call on real tensors in a context, which is told of the memory that they have.

    Args:
        operator: The operator.
        see: Returns the context for a call of this thread that differs from the one before.
    """
    dispatch, this_thread, last = operator._op, threading.get_ident(), [object()]

    def context(call: Sample) -> AbstractContextManager[None]:
        tensors = call.tensors
        if threading.get_ident() != this_thread or not all(type(t) in _PLAIN for t in tensors):
            return contextlib.nullcontext()
        # torch.func's tensors look plain, and have no values to be shown.
        with contextlib.suppress(Exception):
            form = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]
            if form != last[0]:
                last[0] = form
                with _disable_current_modes(), torch.no_grad():
                    return see(call)
        return contextlib.nullcontext()

    def watched(*args: Any, **kwargs: Any) -> Any:
        with context(Sample("", args, kwargs)):
            return dispatch(*args, **kwargs)

    operator._op = watched
    try:
        yield
    finally:
        operator._op = dispatch


def code_in_memory(subject: Subject, call: Sample) -> str:
    """Writes a call whose tensors begin as far from an aligned address as they do now: that alone may end a process.

    Args:
        subject: The operator.
        call: A call of it. Tensors in lists are written without their offset.
    """
    args, ends = [], []
    for value in call.args:
        memory, end = _memory_of(value) if isinstance(value, torch.Tensor) else (value, "")
        args.append(memory)
        ends.append(end)
    *_, written = ways_to_write(Sample(call.label, tuple(args), call.kwargs))
    codes = tuple(code + end for code, end in zip(written.args, ends))
    return replace(written, args=codes).code(subject)


def _memory_of(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Returns the memory of a tensor from the last aligned address on, and what makes the tensor of it, as code."""
    offset = tensor.storage_offset() % (_ALIGNED // tensor.element_size())
    if not offset or not tensor.numel():
        return tensor, ""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = torch.as_strided(tensor.detach(), (offset + reach,), (1,), tensor.storage_offset() - offset)
    return memory.clone(), f".as_strided({tuple(tensor.shape)}, {tensor.stride()}, {offset})"
