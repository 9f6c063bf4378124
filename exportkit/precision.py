"""Whether torch may compute float32 products and convolutions with fewer digits. Models and callers change that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

import torch
from msgspec import Struct

T = TypeVar("T")

# A general setting holds where the particular one says "none".
_GENERAL = ("backends", "backends.cudnn", "backends.mkldnn")
_PLACES = (
    *_GENERAL,
    "backends.cuda.matmul",
    "backends.cudnn.conv",
    "backends.cudnn.rnn",
    "backends.mkldnn.matmul",
    "backends.mkldnn.conv",
    "backends.mkldnn.rnn",
)


class Float32Precision(Struct, frozen=True):
    """All of torch's settings about the precision of float32: the `fp32_precision` of torch.backends and of its parts.

    The last three are torch's older interface. Reading one raises where it contradicts the newer one; it is None then.
    """

    places: dict[str, str]
    matmul: str | None
    matmul_tf32: bool | None
    cudnn_tf32: bool | None

    @classmethod
    def current(cls) -> Float32Precision:
        """The settings of this process."""
        return cls(
            {place: _at(place).fp32_precision for place in _PLACES},
            _consistent(torch.get_float32_matmul_precision),
            _consistent(lambda: torch.backends.cuda.matmul.allow_tf32),
            _consistent(lambda: torch.backends.cudnn.allow_tf32),
        )

    def apply(self) -> None:
        """Makes them the settings of this process."""
        if self.matmul_tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        if self.cudnn_tf32 is not None:
            torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        for place, precision in self.places.items():
            if _at(place).fp32_precision != precision:
                _at(place).fp32_precision = precision


def allow_tf32(allowed: bool) -> None:
    """Lets torch round the factors of float32 products and convolutions to TF32, or keeps it from every rounding."""
    for place in _GENERAL:
        _at(place).fp32_precision = "none"
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


@contextmanager
def with_tf32(allowed: bool) -> Iterator[None]:
    """A context in which `allow_tf32` holds."""
    before = Float32Precision.current()
    allow_tf32(allowed)
    try:
        yield
    finally:
        before.apply()


def _at(place: str) -> Any:
    return attrgetter(place)(torch)


def _consistent(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except RuntimeError:
        return None
