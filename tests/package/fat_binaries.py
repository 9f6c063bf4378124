"""Fat binaries made by hand, as nvcc and fatbinary write them."""

from __future__ import annotations

from exportkit.package import core

PTX, MACHINE = 1, 2
_FLAGS = {"": 0, "a": 0x100000, "f": 0x200000}


def fat_binary(*entries: tuple[int, int] | tuple[int, int, str], version: tuple[int, int] = (9, 0)) -> bytes:
    """Makes one of entries: a kind, an architecture such as 90, and a suffix such as a; all with a version of PTX."""
    made = b"".join(_entry(kind, number, *suffix, version=version) for kind, number, *suffix in entries)
    return b"\x50\xed\x55\xba\x01\x00\x10\x00" + len(made).to_bytes(8, "little") + made


def _entry(kind: int, number: int, suffix: str = "", *, version: tuple[int, int]) -> bytes:
    (major, minor), body = version, b"packed"
    numbers = [(kind, 2), (0x101, 2), (64, 4), (len(body), 8), (len(body), 4), (0, 4), (minor, 2), (major, 2)]
    numbers += [(number, 4), (0, 4), (0, 4), (0x8011 | _FLAGS[suffix], 8)]
    return b"".join(value.to_bytes(size, "little") for value, size in numbers).ljust(64, b"\0") + body


def ptx_rejection(code: bytes, driver: str) -> str:
    """Why a driver for this version of CUDA cannot compile the code's PTX; nothing if it can."""
    return core.text("ek_ptx_rejection", code, len(code), driver.encode()).decode()
