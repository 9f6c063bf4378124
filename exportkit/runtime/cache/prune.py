"""Lists and prunes the cache while models may be running."""

from __future__ import annotations

import ctypes
import tempfile
from ctypes import POINTER, byref, c_double, c_int, c_int64
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.package import core


class Item(msgspec.Struct, frozen=True):
    """An entry of the cache: an unpacked library or target, code that an export compiled, the record of a package.

    Or a leftover of a killed process. `used` is the time of last use, in seconds since 1970; `in_use`, whether a
    process uses or writes it now.
    """

    kind: Literal["library", "target", "compiled", "package", "leftover"]
    path: Path
    size: int
    used: float
    in_use: bool


class _Found(Item, frozen=True):
    removed: bool

    @property
    def item(self) -> Item:
        return Item(self.kind, self.path, self.size, self.used, self.in_use)


class Pruned(msgspec.Struct, frozen=True):
    """The removed and the kept items."""

    removed: tuple[Item, ...]
    kept: tuple[Item, ...]


class _Limits(ctypes.Structure):
    _fields_ = (("max_bytes", POINTER(c_int64)), ("unused_for", POINTER(c_double)), ("everything", c_int))


def cache_items() -> tuple[Item, ...]:
    """Returns the items of the cache and the leftovers in the temporary directory, least recently used first.

    CacheError: another user could change the cache, so its content is not safe to follow.
    """
    return tuple(found.item for found in _found(None))


def prune(*, max_bytes: int | None = None, unused_for: float | None = None, everything: bool = False) -> Pruned:
    """Removes leftovers of killed processes and items that exceed the limits, but no items in use.

    Args:
        max_bytes: Removes the least recently used items until the rest fits. Records of packages stay: they are small,
            and a large package without a record is hashed again.
        unused_for: Removes items that were unused for this many seconds.
        everything: Removes all items.

    Raises:
        CacheError: The same as for `cache_items`. Nothing was removed.
    """
    limits = _Limits(everything=everything)
    if max_bytes is not None:
        limits.max_bytes = ctypes.pointer(c_int64(max_bytes))
    if unused_for is not None:
        limits.unused_for = ctypes.pointer(c_double(unused_for))
    found = _found(limits)
    removed, kept = (tuple(one.item for one in found if one.removed is wanted) for wanted in (True, False))
    return Pruned(removed, kept)


def _found(limits: _Limits | None) -> list[_Found]:
    folder = core.encoded(tempfile.gettempdir())
    answer = core.text("ek_cache_items", folder, None if limits is None else byref(limits))
    return msgspec.json.decode(answer, type=list[_Found], dec_hook=lambda kind, value: kind(value))
