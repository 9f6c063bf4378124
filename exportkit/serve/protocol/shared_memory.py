"""System shared memory: regions of files under /dev/shm, in which clients on this machine leave and find tensors."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from exportkit.serve.protocol.datatypes import shortened, shown
from exportkit.serve.protocol.inference import InputTensor
from exportkit.serve.protocol.parameters import RegionSlice
from exportkit.serve.protocol.tensors import TensorSpec, aligned_bytes
from exportkit.serve.statuses import BadRequestError, NotOfferedError, NotServedError

_FOLDER = b"/dev/shm/"
_MOST_REGIONS = 256  # each holds a file descriptor
_MOST_BYTES = (1 << 63) - 1


class _Registration(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    byte_size: int
    offset: int = 0


@dataclass(frozen=True)
class _Region:
    key: str
    offset: int
    byte_size: int
    descriptor: int


class SharedMemory:
    """The registered regions. Methods can be called by several threads.

    Files are read and written, never mapped: a client that truncates a mapped file ends the process (SIGBUS), and one
    that writes while the model reads could change what was checked.
    """

    def __init__(self) -> None:
        """Nothing is registered."""
        self._regions: dict[str, _Region] = {}
        self._lock = threading.Lock()
        self._clients: dict[str, SharedMemory] = {}

    def of(self, client: str) -> SharedMemory:
        """Returns the regions of a client, which no other one can name. Empty: no key is asked for."""
        return self._clients.setdefault(client, SharedMemory()) if client else self

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Registers `byte_size` bytes from `offset` of the file `key` under /dev/shm.

        Raises:
            BadRequestError: The name is taken, the key is not a plain name of a regular file, or the file is too small.
        """
        if offset < 0 or byte_size < 1 or offset + byte_size > _MOST_BYTES:
            raise BadRequestError(
                f"the region {shown(name)} has the offset {_clipped(offset)} and the size {_clipped(byte_size)}; "
                "an offset is not negative, and a size is at least 1"
            )
        with self._lock:
            self._check_name(name)
            descriptor = _open(key)
            try:
                _check_fits(key, descriptor, offset + byte_size)
            except BaseException:
                os.close(descriptor)
                raise
            self._regions[name] = _Region(key, offset, byte_size, descriptor)

    def register_body(self, name: str, body: bytes | memoryview) -> None:
        """Registers what the body of an HTTP request says: a JSON object with `key`, `offset` and `byte_size`.

        Raises:
            BadRequestError: The body is something else, or `register` refuses it.
        """
        try:
            said = msgspec.json.decode(body, type=_Registration)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(
                f"the body does not register a region: {shortened(error)}",
                hint='It is a JSON object, as in {"key": "/name", "offset": 0, "byte_size": 1024}.',
            ) from None
        self.register(name, said.key, said.offset, said.byte_size)

    def unregister(self, name: str = "") -> None:
        """Forgets a region; without a name, all. A name that is not registered changes nothing, as in Triton."""
        with self._lock:
            for each in [name] if name else list(self._regions):
                region = self._regions.pop(each, None)
                if region is not None:
                    os.close(region.descriptor)

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Returns the regions, or one: `name`, `key`, `offset` and `byte_size` of each.

        Raises:
            NotServedError: No such region.
        """
        with self._lock:
            regions = {each: region for each, region in self._regions.items() if name in ("", each)}
        if name and not regions:
            raise NotServedError(f"no region {shown(name)} is registered")
        return [
            {"name": each, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
            for each, region in regions.items()
        ]

    @property
    def largest(self) -> int:
        """The bytes of the largest region."""
        with self._lock:
            return max((region.byte_size for region in self._regions.values()), default=0)

    def read(self, where: RegionSlice) -> memoryview:
        """Returns a copy of a slice, which starts at a multiple of 64 bytes.

        Raises:
            BadRequestError: No such region, the slice leaves it, or the file was truncated.
        """
        with self._held(where) as (region, start):
            data, done = aligned_bytes(where.size), 0
            while done < where.size:  # one call reads at most 2 GiB
                count = os.preadv(region.descriptor, [data[done:]], start + done)
                if not count:
                    _check_fits(region.key, region.descriptor, start + where.size)
                    raise BadRequestError(f"the shared memory {shown(region.key)} was truncated while it was read")
                done += count
            return data

    def write(self, where: RegionSlice, data: memoryview) -> None:
        """Writes an output to the start of a slice.

        Raises:
            BadRequestError: No such region, the slice leaves it, the output is larger than it, or the file was
                truncated.
        """
        if data.nbytes > where.size:
            raise BadRequestError(
                f"the output has {data.nbytes} bytes; {where.size} are offered in the region {shown(where.region)}"
            )
        data, done = data.cast("B"), 0
        with self._held(where) as (region, start):
            _check_fits(region.key, region.descriptor, start + where.size)
            while done < len(data):
                done += os.pwrite(region.descriptor, data[done:], start + done)

    def close(self) -> None:
        """Forgets all regions."""
        self.unregister()
        for memory in self._clients.values():
            memory.close()

    def _check_name(self, name: str) -> None:
        if not name:
            raise BadRequestError("the region's name is empty")
        if name in self._regions:
            raise BadRequestError(
                f"a region {shown(name)} is registered", hint="Unregister it first, or choose another name."
            )
        if len(self._regions) >= _MOST_REGIONS:
            raise BadRequestError(f"{_MOST_REGIONS} regions are registered, which is the most", hint="Unregister one.")

    @contextmanager
    def _held(self, where: RegionSlice) -> Iterator[tuple[_Region, int]]:
        """Gives the region of a slice with a descriptor of its own, and where the slice starts in its file.

        So the file stays open even if the region is forgotten meanwhile. A descriptor that is closed becomes another
        file's.
        """
        with self._lock:
            region = self._regions.get(where.region)
            if region is None:
                raise BadRequestError(f"no region {shown(where.region)} is registered", hint="Register it first.")
            if where.offset + where.size > region.byte_size:
                raise BadRequestError(
                    f"{where.size} bytes from {where.offset} leave the region {shown(where.region)}, "
                    f"which has {region.byte_size} bytes"
                )
            held = replace(region, descriptor=os.dup(region.descriptor))
        try:
            yield held, held.offset + where.offset
        except OSError as error:
            said = os.strerror(error.errno or 0)
            raise BadRequestError(f"the region {shown(where.region)} cannot be used: {said}") from None
        finally:
            os.close(held.descriptor)


def offered(shared_memory: SharedMemory | None) -> SharedMemory:
    """Returns the regions.

    Raises:
        NotOfferedError: There are none, because the server was started without them.
    """
    if shared_memory is None:
        raise NotOfferedError(
            "this server does not offer shared memory", hint="Start it with --shared-memory, or send the data."
        )
    return shared_memory


def input_of_region(shared_memory: SharedMemory | None, spec: TensorSpec, where: RegionSlice) -> InputTensor:
    """Returns an input that lies in shared memory.

    Raises:
        BadRequestError: The slice has another size than the input, or cannot be read.
        NotOfferedError: This server does not offer shared memory.
    """
    regions = offered(shared_memory)
    spec.check_size(where.size)
    return spec.of_bytes(regions.read(where))


def _open(key: str) -> int:
    name = key.removeprefix("/").encode()
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name or len(name) > 255:
        raise BadRequestError(
            f"the key {shown(key)} is not the name of shared memory",
            hint="It is the name of a file in /dev/shm, as `/name`, without further slashes.",
        )
    # Not blocking: opening a pipe would wait for its other end.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(_FOLDER + name, flags)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
        raise BadRequestError(f"the shared memory {shown(key)} cannot be opened: {why}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadRequestError(f"the shared memory {shown(key)} is not a regular file")
    return descriptor


def _check_fits(key: str, descriptor: int, end: int) -> None:
    size = os.fstat(descriptor).st_size
    if end > size:
        raise BadRequestError(f"the shared memory {shown(key)} has {size} bytes, and {end} are needed")


def _clipped(number: int) -> str:
    return str(number) if abs(number) < 1 << 64 else "..."
