"""Reads the graph of an ExportedProgram from its archive, without torch: the graph is JSON, and nothing is unpickled.

torch.export.save writes a zip archive. Its record `models/<name>.json` has the graph as torch/_export/serde/schema.py
describes it; only what is needed here is decoded, so that other minor versions of that schema are read too.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from typing import BinaryIO, cast

import msgspec

from exportkit.errors import PackageError
from exportkit.package.archive import PackageReader

SCHEMA_MAJOR = 8  # of torch's schema of programs
MAX_BYTES = 64 << 20  # of the JSON
MOST_AT_ONCE = 16 << 20  # bytes: the directory of a package has at most as many
_RECORD = re.compile(r"[^/]+/models/[^/]+\.json")
_CHUNK = 1 << 20


class ProgramGraphError(PackageError):
    """A file has no graph of an ExportedProgram that can be read."""


class _Node(msgspec.Struct, frozen=True):
    target: str


class _Graph(msgspec.Struct, frozen=True):
    nodes: list[_Node]


class _GraphModule(msgspec.Struct, frozen=True):
    graph: _Graph


class _SchemaVersion(msgspec.Struct, frozen=True):
    major: int
    minor: int


class _Program(msgspec.Struct, frozen=True):
    graph_module: _GraphModule
    schema_version: _SchemaVersion


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(_Program)


def called_operators(reader: PackageReader, method: str) -> list[str]:
    """Returns what the nodes of a method's graph call, in an open artifact that has programs.

    The caller checks the digests (`reader.verify`).

    Raises:
        ProgramGraphError: The record of the program is not what torch writes.
        UsageError: There is no such method.
    """
    program = reader.manifest.program
    assert program is not None
    handle = reader.handle  # the file stays open as long as this is referred to
    record = program.records[reader.manifest.method(method).name]
    file = _Window(reader.fileno(), reader.data_offset(record), reader.record(record).size)
    found = _read(file, f"{reader.path}, {record}")
    del handle
    return found


class _Window:
    """A part of an open file, from which zipfile reads. Nothing is copied, and no read is large.

    zipfile reads the whole directory of an archive at once, and makes an object of each entry. Therefore a directory of
    hundreds of megabytes is refused here, as that of a package is.
    """

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        self._descriptor, self._begin, self._size, self._at = descriptor, begin, size, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("negative seek position")  # as other files do
        self._at = base + offset
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        count = left if count < 0 else min(count, left)
        if count > MOST_AT_ONCE:
            raise ValueError(f"its directory has more than {MOST_AT_ONCE >> 20} MiB")
        content = os.pread(self._descriptor, count, self._begin + self._at)
        self._at += len(content)
        return content


def _read(file: _Window, name: str) -> list[str]:
    try:
        program = _DECODER.decode(_text(file, name))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProgramGraphError(f"{name} has no graph in the form that torch writes: {error}") from error
    if program.schema_version.major != SCHEMA_MAJOR:
        version = f"{program.schema_version.major}.{program.schema_version.minor}"
        raise ProgramGraphError(
            f"{name} has a program of schema {version}; this exportkit reads schema {SCHEMA_MAJOR}",
            hint="Export it with a torch that this exportkit supports.",
        )
    return [node.target for node in program.graph_module.graph.nodes]


def _text(file: _Window, name: str) -> bytes:
    """Returns the JSON. Sizes that the archive states are not believed."""
    try:
        with zipfile.ZipFile(cast("BinaryIO", file)) as archive:
            found = [record for record in archive.infolist() if _RECORD.fullmatch(record.filename)]
            if len(found) != 1:
                raise ProgramGraphError(f"{name} is not a file of torch.export.save: it has {len(found)} programs")
            with archive.open(found[0]) as record:
                parts, left = [], MAX_BYTES
                while part := record.read(min(_CHUNK, left + 1)):
                    left -= len(part)
                    if left < 0:
                        raise ProgramGraphError(f"{name} has a graph of more than {MAX_BYTES >> 20} MiB")
                    parts.append(part)
        return b"".join(parts)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        # NotImplementedError and RuntimeError: a compression that this Python lacks, or an encrypted record.
        raise ProgramGraphError(f"{name} is not a file of torch.export.save: {error}") from error
