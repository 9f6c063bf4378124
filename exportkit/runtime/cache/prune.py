"""What the cache holds, and how it is kept small, beside running models."""

from __future__ import annotations

import ctypes
import tempfile
from ctypes import POINTER, byref, c_double, c_int, c_int64
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.package import core


class Item(msgspec.Struct, frozen=True):
    """Something that is kept, or left over.

    Attributes:
        kind: An unpacked library or target; the record of a package; what a killed process left.
        path: Its folder or file.
        size: In bytes.
        used: When it was last used, in seconds since 1970.
        in_use: Whether a process uses it now, or writes it.
    """

    kind: Literal["library", "target", "package", "leftover"]
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
    """What was removed, and what stayed."""

    removed: tuple[Item, ...]
    kept: tuple[Item, ...]


class _Limits(ctypes.Structure):
    _fields_ = (("max_bytes", POINTER(c_int64)), ("unused_for", POINTER(c_double)), ("everything", c_int))


def cache_items() -> tuple[Item, ...]:
    """What is in the cache, and what was left in the temporary directory; first what was used least recently.

    Raises:
        CacheError: Another user could change the cache: what is in it may lead anywhere.
    """
    return tuple(found.item for found in _found(None))


def prune(*, max_bytes: int | None = None, unused_for: float | None = None, everything: bool = False) -> Pruned:
    """Removes what killed processes left, and what the limits leave no room for; never what is in use.

    Args:
        max_bytes: What was used least recently goes until no more is left. Records of packages stay: they take no room,
            and without one a large package is hashed again.
        unused_for: What was not used for so many seconds goes.
        everything: All goes.

    Raises:
        CacheError: As of `cache_items`; nothing was removed.
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
