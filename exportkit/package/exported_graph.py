"""Reads the graph of an ExportedProgram from its archive, without torch: the graph is JSON, and nothing is unpickled.

torch.export.save writes a zip archive. Its record `models/<name>.json` has the graph as torch/_export/serde/schema.py
describes it; only what is needed here is decoded, so that other minor versions of that schema are read too.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

import msgspec

from exportkit.errors import PackageError
from exportkit.package.archive import PackageReader

SCHEMA_MAJOR = 8  # of torch's schema of programs
MAX_BYTES = 64 << 20  # of the JSON
MOST_AT_ONCE = 16 << 20  # bytes: the directory of a package has at most as many
_RECORD = re.compile(r"[^/]+/models/[^/]+\.json")
_CHUNK = 1 << 20

# torch's numbers of dtypes (torch/_export/serde/schema.py).
DTYPE_NAMES: Mapping[int, str] = {
    **{1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64"},
    **{9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16"},
    **{29: "float8_e4m3fn", 30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu"},
    **{34: "uint32", 35: "uint64"},
}

# Arguments are unions: an object with one key, such as {"as_tensor": {"name": "x"}}.
Argument = dict[str, Any]


class ProgramGraphError(PackageError):
    """A file has no graph of an ExportedProgram that can be read."""


class NamedArgument(msgspec.Struct, frozen=True):
    """An argument of a node, with its name in the operator's schema."""

    name: str
    arg: Argument


class Node(msgspec.Struct, frozen=True):
    """A call. `metadata` has where it comes from: stack_trace, nn_module_stack."""

    target: str
    inputs: list[NamedArgument]
    outputs: list[Argument]
    metadata: dict[str, str] = {}
    name: str | None = None


class TensorMeta(msgspec.Struct, frozen=True):
    """The dtype of a tensor, as a number, and its sizes: {"as_int": 3} or {"as_expr": {"expr_str": ...}}."""

    dtype: int
    sizes: list[dict[str, Any]]


class Graph(msgspec.Struct, frozen=True):
    """Nodes in an order in which they can run, and what is known about their values."""

    inputs: list[Argument]
    outputs: list[Argument]
    nodes: list[Node]
    tensor_values: dict[str, TensorMeta]
    sym_int_values: dict[str, Any] = {}


class GraphSignature(msgspec.Struct, frozen=True):
    """What the graph's inputs and outputs are: {"user_input": ...}, {"parameter": ...}."""

    input_specs: list[dict[str, Any]]
    output_specs: list[dict[str, Any]]


class GraphModule(msgspec.Struct, frozen=True):
    """A graph with its signature."""

    graph: Graph
    signature: GraphSignature


class SchemaVersion(msgspec.Struct, frozen=True):
    """The version of torch's schema."""

    major: int
    minor: int


class _Program(msgspec.Struct, frozen=True):
    graph_module: GraphModule
    schema_version: SchemaVersion


# Made at import: exportkit.package.manifest says why.
_DECODER = msgspec.json.Decoder(_Program)


def graph_of(reader: PackageReader, method: str) -> GraphModule | None:
    """Reads the graph of a method of an open artifact; None if the artifact has no program.

    The caller checks the digests (`reader.verify`).

    Raises:
        ProgramGraphError: The record of the program is not what torch writes.
        UsageError: There is no such method.
    """
    program = reader.manifest.program
    if program is None:
        return None
    handle = reader.handle  # the file stays open as long as this is referred to
    record = program.records[reader.manifest.method(method).name]
    file = _Window(reader.fileno(), reader.data_offset(record), reader.record(record).size)
    found = _read(file, f"{reader.path}, {record}")
    del handle
    return found


def tensors_in(argument: Argument) -> Iterator[str]:
    """Yields the names of the values that an argument refers to: tensors and symbolic numbers, also those in lists."""
    for kind, value in argument.items():
        if kind == "as_graph" or not isinstance(value, (dict, list)):
            continue
        todo = [value]
        while todo:
            item = todo.pop()
            if isinstance(item, list):
                todo.extend(reversed(item))
            elif isinstance(item, dict):
                name = item.get("name", item.get("as_name"))
                if isinstance(name, str):
                    yield name
                else:
                    todo.extend(reversed(item.values()))


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


def _read(file: _Window, name: str) -> GraphModule:
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
    return program.graph_module


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
