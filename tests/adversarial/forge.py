"""Makes packages that break one rule: the layout and all digests are right unless a test says otherwise."""

from __future__ import annotations

import copy
import functools
import hashlib
import operator
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from exportkit.errors import PackageError
from exportkit.package.archive import ROOT
from exportkit.package.manifest import MANIFEST_NAME, Manifest, Record
from tests.package import samples, stateful_samples

Document = dict[str, Any]
Taken = Callable[[bytes], Manifest]  # the fixtures in conftest.py
Refused = Callable[[bytes, type[PackageError], str], PackageError]

STOCK_RECORDS = {
    ".data/version": b"6\n",
    "archive_format": b"pt2",
    "archive_version": b"0",
    "byteorder": b"little",
}
MAX_MANIFEST_BYTES = MAX_DIRECTORY_BYTES = 16 << 20
MAX_NAME_LENGTH = 512


def records(more: Mapping[str, bytes] | None = None, of: Mapping[str, bytes] = samples.RECORDS) -> dict[str, bytes]:
    """All records of a sample but the manifest, and some more, in order."""
    return dict(sorted({**of, **STOCK_RECORDS, **(more or {})}.items()))


SIDECAR_RECORDS = records(of=samples.SIDECAR_RECORDS)
STATEFUL_RECORDS = records(of=stateful_samples.RECORDS)


def listing(contents: Mapping[str, bytes]) -> tuple[Record, ...]:
    """What a manifest says of these records."""
    return tuple(
        Record(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in sorted(contents.items())
    )


def sidecar() -> Document:
    """The manifest of an ONNX model's sidecar, to be changed at will."""
    return document(samples.sidecar(), SIDECAR_RECORDS)


def stateful() -> Document:
    """The manifest of the sample with two methods and state, to be changed at will."""
    return document(stateful_samples.manifest(), STATEFUL_RECORDS)


def document(manifest: Manifest | None = None, contents: Mapping[str, bytes] | None = None) -> Document:
    """A manifest as JSON has it, to be changed at will; its records are listed."""
    listed = listing(records() if contents is None else contents)
    whole = msgspec.structs.replace(manifest or samples.manifest(), records=listed)
    decoded: Document = msgspec.json.decode(msgspec.json.encode(whole))
    return decoded


def full(contents: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    """Names with the root."""
    return [(f"{ROOT}/{name}", content) for name, content in contents.items()]


TENSOR = {"type": "tensor", "index": 0}


def named_tuple(class_name: str, *fields: str) -> Document:
    """A result that is a named tuple: the output, and nothing more."""
    items = [TENSOR, *[{"type": "constant", "value": None}] * (len(fields) - 1)]
    return {"type": "namedtuple", "class_name": class_name, "fields": list(fields), "items": items}


# --- the layout: what FORMAT.md says of the bytes ---------------------------------------------------------------------

ALIGNMENT = 64
_MAX32 = 0xFFFFFFFF


class Entry(NamedTuple):
    """A record's place: `offset` is that of its local header, which its data follow."""

    name: str
    size: int
    crc32: int
    offset: int

    @property
    def data_offset(self) -> int:
        return self.offset + len(local_header(self))

    @property
    def end(self) -> int:
        return self.data_offset + self.size


def local_header(entry: Entry) -> bytes:
    """What precedes a record's data, padded so that they start on an aligned offset."""
    name = entry.name.encode()
    sizes = struct.pack("<HHQQ", 1, 16, entry.size, entry.size)
    gap = -(entry.offset + 30 + len(name) + len(sizes) + 4) % ALIGNMENT
    extra = sizes + struct.pack("<2sH", b"FB", gap) + b"Z" * gap
    fixed = (0x04034B50, 45, 0, 0, 0, 0x21, entry.crc32, _MAX32, _MAX32, len(name), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fixed) + name + extra


CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")


def directory(entries: Sequence[Entry]) -> bytes:
    """Everything after the last record: the central directory and its end."""
    central = b""
    for entry in entries:
        name, extra = entry.name.encode(), struct.pack("<HHQQQ", 1, 24, entry.size, entry.size, entry.offset)
        fixed = (0x02014B50, 45, 45, 0, 0, 0, 0x21, entry.crc32, _MAX32, _MAX32, len(name), len(extra))
        central += CENTRAL.pack(*fixed, 0, 0, 0, 0, _MAX32) + name + extra
    start, count = entries[-1].end if entries else 0, len(entries)
    return b"".join(
        [
            central,
            struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(central), start),
            struct.pack("<IIQI", 0x07064B50, 0, start + len(central), 1),
            struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, _MAX32, _MAX32, 0),
        ]
    )


def archive(contents: Sequence[tuple[str, bytes]], *, before: bytes = b"") -> bytes:
    """An archive of these records in this order, names in full, in the layout that a package has."""
    blocks: list[bytes] = [before]
    entries: list[Entry] = []
    for name, content in contents:
        entry = Entry(name, len(content), zlib.crc32(content), entries[-1].end if entries else len(before))
        entries.append(entry)
        blocks += [local_header(entry), content]
    return b"".join([*blocks, directory(entries)])


def package(manifest: Document | bytes | None = None, contents: Mapping[str, bytes] | None = None) -> bytes:
    """A package of these records with this manifest, whatever it says."""
    contents = records() if contents is None else contents
    manifest = document(contents=contents) if manifest is None else manifest
    encoded = manifest if isinstance(manifest, bytes) else msgspec.json.encode(manifest)
    return archive(full({MANIFEST_NAME: encoded, **contents}))


def _steps(path: str) -> list[str | int]:
    """`call.inputs.0` is in the first method, `targets.0` in the whole."""
    whole = f"methods.0.{path}" if path.partition(".")[0] == "call" else path
    return [int(step) if step.isdigit() else step for step in whole.split(".")]


def at(document: Document, path: str) -> Any:
    """The part of a manifest that a path leads to."""
    return value_at(document, _steps(path))


def changed(path: str, value: Any, base: Document | None = None) -> Document:
    """The sample's manifest with one value replaced; a last step that is not there is added."""
    return replaced(document() if base is None else base, _steps(path), value)


def value_at(value: Any, place: Sequence[Any]) -> Any:
    """What one of `places` leads to."""
    return functools.reduce(operator.getitem, place, value)


def replaced(whole: Document, place: Sequence[Any], value: Any) -> Document:
    """A copy with another value at one of its `places`."""
    if not place:
        return value
    copied = copy.deepcopy(whole)
    *parents, last = place
    value_at(copied, parents)[last] = value
    return copied


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]
