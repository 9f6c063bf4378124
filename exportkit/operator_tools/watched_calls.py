"""Sees each call of an operator from Python, before it is made."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from exportkit.contract.operator_spec import Sample
from exportkit.contract.trial import arguments

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
        tensors = arguments(call)
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
