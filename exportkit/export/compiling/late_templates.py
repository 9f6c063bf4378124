"""Lets Inductor be imported without compiling the templates of kernels, of which few programs use any."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from exportkit.export.torch_patches.torch_internals import replaced


def late_templates() -> AbstractContextManager[None]:
    """Compiles templates that are made while the block runs where they are used: 0.13 seconds of Inductor's import."""
    from torch._inductor.codegen.common import KernelTemplate

    return replaced(KernelTemplate, "_template_from_string", _late)


def _late(original: Any) -> Any:
    compiled: Callable[[str], Any] = original.__func__
    return staticmethod(lambda source: LateTemplate(functools.cache(functools.partial(compiled, source))))


class LateTemplate:
    """A template that is compiled when it is first asked for something."""

    def __init__(self, compiled: Callable[[], Any]) -> None:
        """Takes what compiles it, once."""
        self._compiled = compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled(), name)
