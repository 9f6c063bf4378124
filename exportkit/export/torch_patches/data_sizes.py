"""Lets sizes that depend on data begin at 0, where a fake kernel names no least value.

`create_unbacked_symint()`, the older name of `new_dynamic_size()`, takes 2 for the least value. Kernels do not know it:
they find one box or none, and compiled code would refuse that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._library.fake_impl import FakeImplCtx

from exportkit.export.torch_patches.patched import patched


def from_zero() -> AbstractContextManager[None]:
    """Lets these sizes begin at 0 while the block runs. A least value that a fake kernel names stays.

    Raises:
        ExportError: This torch lacks the function that is changed.
    """
    return patched("FakeImplCtx.create_unbacked_symint", _of_any_size)


def _of_any_size(_: object, context: FakeImplCtx, *, min: int = 0, max: int | None = None) -> Any:
    return context.new_dynamic_size(min=min, max=max)
