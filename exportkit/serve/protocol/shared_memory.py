"""System shared memory: regions of files under /dev/shm, in which clients on this machine leave and find tensors."""

from __future__ import annotations

from typing import Any

from exportkit.serve.protocol.parameters import RegionSlice


class SharedMemory:
    """The registered regions. Methods are for one thread at a time.

    Files are read and written, never mapped: a client that truncates a mapped file ends the process (SIGBUS), and one
    that writes while the model reads could change what was checked.
    """

    def __init__(self) -> None:
        """Nothing is registered."""
        raise NotImplementedError

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Registers `byte_size` bytes from `offset` of the file `key` under /dev/shm.

        Raises:
            BadRequestError: The name is taken, the key is not a plain name of a regular file, or the file is too small.
        """
        raise NotImplementedError

    def register_body(self, name: str, body: bytes | memoryview) -> None:
        """Registers what the body of an HTTP request says: a JSON object with `key`, `offset` and `byte_size`."""
        raise NotImplementedError

    def unregister(self, name: str = "") -> None:
        """Forgets a region; without a name, all. A name that is not registered changes nothing, as in Triton."""
        raise NotImplementedError

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Returns the regions, or one: `name`, `key`, `offset` and `byte_size` of each.

        Raises:
            NotServedError: No such region.
        """
        raise NotImplementedError

    def read(self, where: RegionSlice) -> memoryview:
        """Returns a copy of a slice, which starts at a multiple of 64 bytes.

        Raises:
            BadRequestError: No such region, the slice leaves it, or the file was truncated.
        """
        raise NotImplementedError

    def write(self, where: RegionSlice, data: memoryview) -> None:
        """Writes an output to the start of a slice.

        Raises:
            BadRequestError: No such region, the slice leaves it, or the output is larger than it.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Forgets all regions."""
        self.unregister()
