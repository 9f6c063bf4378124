"""Lets torch remember what an operator answers to fake tensors from its second call of a kind on.

While a model is traced, torch remembers each answer. To see whether it may, it makes the answer once more, with all
questions about sizes: half of a trace in which few calls are like earlier ones. Where layers repeat, the second layer
fills what the others read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode, _BypassDispatchCache, _CacheKeyState

from exportkit.export.torch_patches.patched import patched


def remembered_when_repeated() -> AbstractContextManager[None]:
    """Lets torch forget the first answer of each kind, while the block runs.

    Raises:
        ExportError: This torch lacks the function that is changed.
    """
    return patched("FakeTensorMode._cached_dispatch_impl", _from_the_second)


def _from_the_second(remembering: Callable[..., Any]) -> Callable[..., Any]:
    seen: set[Any] = set()

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            key = mode._cache_key(_CacheKeyState(mode.shape_env), func, args, kwargs)
        except _BypassDispatchCache:
            key = None
        if key is None or key in seen:
            return remembering(mode, func, types, args, kwargs)
        seen.add(key)
        return mode._dispatch_impl(func, types, args, kwargs)

    return dispatch
