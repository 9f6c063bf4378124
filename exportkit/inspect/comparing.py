"""Compares two artifacts part by part, without running or importing anything of either, and without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.onnx.files import open_artifact
from exportkit.package.archive import PackageReader
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.dtypes import ITEM_BYTES, values_of
from exportkit.package.manifest import Manifest
from exportkit.progress import Progress, silent
from exportkit.sizes import case_label, shape_text

Effect = Literal["answer", "load"]


@dataclass(frozen=True)
class Difference:
    """One difference of two artifacts A and B.

    Attributes:
        part: The part of the artifacts, such as "weights".
        what: The thing that differs, such as "head.weight".
        a: A's value; None if only B has the thing.
        b: B's value; None if only A has the thing.
        effect: What it may change: the answer of a call, or where and how the artifact can be loaded. None: neither.
        max_abs: For tensors, the greatest absolute difference of two elements; inf if only one of them is NaN or
            infinite.
    """

    part: str
    what: str
    a: str | None
    b: str | None
    effect: Effect | None = None
    max_abs: float | None = None


@dataclass(frozen=True)
class Side:
    """One of the two artifacts: its file, its name and version, the file's size in bytes and its digest."""

    path: str
    name: str
    version: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        a: The first artifact.
        b: The second artifact.
        differences: All differences, by part.
    """

    a: Side
    b: Side
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether no difference changes an answer or a load."""
        return not any(difference.effect for difference in self.differences)


# What a part of the manifest changes, by the first pattern that its place begins with. "answer", if none does.
_EFFECTS: tuple[tuple[str, Effect | None], ...] = (
    (r"name|version|source|provenance", None),
    (r".*\.(tolerance|written\.|built_with_|aliases)", None),
    (r"targets\.[^.]*\.constants|libraries\..*\.sha256", "answer"),
    (r"format_version|targets|libraries|operators|program", "load"),
)
# Not compared as text: names of records, the digests in them, and what is compared by its values.
_NO_TEXT = {"records", "record", "initial", "weights", "cases"}
_CONSTANT_DIGEST = re.compile("@[0-9a-f]{16}$")


def compare_artifacts(a: Path, b: Path, *, progress: Progress = silent) -> Comparison:
    """Compares two artifacts.

    Args:
        a: An artifact or a package, or an ONNX model with its sidecar beside it.
        b: Another one.
        progress: Called with each step before it starts.

    Raises:
        UsageError: A file does not exist or cannot be read.
        PackageError: An artifact breaks a rule of the format, or a digest does not hold.
        HostError: The library that reads packages was not built.
    """
    progress(f"checking {a.name}")
    with open_artifact(a) as one:
        progress(f"checking {b.name}")
        with open_artifact(b) as other:
            progress("comparing")
            return Comparison(_side(one), _side(other), tuple(_differences(one, other)))


def _side(reader: PackageReader) -> Side:
    return Side(str(reader.path), reader.manifest.name, reader.manifest.version, reader.size, reader.sha256)


def _differences(a: PackageReader, b: PackageReader) -> Iterator[Difference]:
    yield from _manifest((), a.manifest, b.manifest)
    one, other = initial_state(a), initial_state(b)
    alike = {name: tensor for name, tensor in one.items() if str(tensor) == str(other.get(name))}  # others were named
    yield from compare_tensors("state", alike, {name: other[name] for name in alike})
    yield from compare_tensors("weights", weights(a), weights(b))
    yield from _code(a.manifest, b.manifest)
    yield from _programs(a, b)
    yield from _cases(a.manifest, b.manifest)


# --- the manifest -----------------------------------------------------------------------------------------------------


def _manifest(place: tuple[str, ...], a: object, b: object) -> Iterator[Difference]:
    """Compares two values of a manifest: structures by the names of their parts, all others as text."""
    one, other = _parts(a), _parts(b)
    if one is None or other is None:
        yield from _texts(place, _text(a), _text(b))
        return
    for name in dict.fromkeys([*one, *other]):
        if name in one and name in other:
            yield from _manifest((*place, name), one[name], other[name])
        else:
            yield from _texts((*place, name), *(_text(side[name]) if name in side else None for side in (one, other)))


def _parts(value: object) -> Mapping[str, object] | None:
    """Returns the parts of a value by name; None if it has none."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__ if name not in _NO_TEXT}
        if "shape" in fields:
            fields["type"] = f"{fields.pop('dtype')}{shape_text(fields.pop('shape'))}"
        return fields
    if isinstance(value, tuple) and all(isinstance(each, msgspec.Struct) for each in value):
        return {_name(each, number): each for number, each in enumerate(value)}
    return value if isinstance(value, dict) else None


def _name(item: msgspec.Struct, number: int) -> str:
    """Returns what an item of a list is known by: its name, or its number."""
    path = getattr(item, "record", None)  # of a library
    return getattr(item, "name", None) or (path and path.removeprefix("exportkit/ops/")) or str(number)


def _text(value: object) -> str:
    if value is msgspec.UNSET:
        return "not given"
    return _CONSTANT_DIGEST.sub("", value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _texts(place: tuple[str, ...], a: str | None, b: str | None) -> Iterator[Difference]:
    if a != b:
        path = ".".join(place)
        effect: Effect | None = next((kind for begin, kind in _EFFECTS if re.match(begin, path)), "answer")
        part, what = (place[0], ".".join(place[1:])) if len(place) > 1 else ("package", path)
        yield Difference(part, what, a, b, effect)


# --- files ------------------------------------------------------------------------------------------------------------


def _code(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares the files of compiled code that both have a folder for. Another build may answer otherwise."""
    files = [
        {
            tuple(record.name.removeprefix(f"{AOTINDUCTOR_DIR}/").split("/", 1)): record.sha256
            for record in side.records
            if record.name.startswith(f"{AOTINDUCTOR_DIR}/")
        }
        for side in (a, b)
    ]
    folders = {folder for folder, _ in files[0]} & {folder for folder, _ in files[1]}
    for folder, name in dict.fromkeys([*files[0], *files[1]]):
        one, other = (side.get((folder, name)) for side in files)
        if folder in folders and one != other:
            yield Difference("code", f"{folder}/{name}", one, other, "answer")


def _programs(a: PackageReader, b: PackageReader) -> Iterator[Difference]:
    """Compares exported programs by their digests."""
    records = [side.manifest.program.records if side.manifest.program else {} for side in (a, b)]
    for method in [name for name in records[0] if name in records[1]]:
        one, other = (side.record(names[method]).sha256 for side, names in zip((a, b), records))
        if one != other:
            yield Difference("program", method, one, other, "answer")


def _cases(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares the recorded cases in their order. They change no answer: they are what eager answered."""
    here, there = ([*map(case_label, side.cases)] for side in (a, b))
    digests = [{record.name: record.sha256 for record in side.records} for side in (a, b)]
    contents = [[(case.calls, sha256[case.record]) for case in side.cases] for side, sha256 in zip((a, b), digests)]
    for number, (one, other) in enumerate(zip_longest(*contents)):
        if one != other:
            labels = here[number] if one else None, there[number] if other else None
            if labels[0] == labels[1]:
                labels = labels[0], f"{labels[1]}, other inputs or answers"
            yield Difference("cases", f"case {number}", *labels)


# --- the tensors that both store, by name, with NumPy alone -----------------------------------------------------------


_CHUNK = 1 << 22  # bytes; a multiple of every element's size


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a package.

    Attributes:
        reader: The package.
        dtype: torch's name of the dtype.
        shape: The sizes.
        strides: The strides of the elements, which have no gaps.
        record: The record with the elements; None if they are zeros.
    """

    reader: PackageReader
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    record: str | None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (f", strides {list(self.strides)}" if self.strides else "")

    def read(self) -> bytes:
        """Returns the elements."""
        if self.record is None:
            return bytes(prod(self.shape) * ITEM_BYTES[self.dtype])
        return self.reader.read(self.record)


def weights(reader: PackageReader) -> dict[str, StoredTensor]:
    """Returns the weights that code reads by the names of the model's state, constants by AOTInductor's names."""
    found: dict[str, StoredTensor] = {}
    for weight in reader.manifest.weights:
        if weight.record is not None:
            tensor = StoredTensor(reader, weight.dtype, weight.shape, weight.strides, weight.record)
            short = weight.name.rpartition("@")[0]  # a constant's name has its digest
            name = short if not weight.state and short and short not in found else weight.name
            found |= dict.fromkeys((name, *weight.aliases), tensor)
    return found


def initial_state(reader: PackageReader) -> dict[str, StoredTensor]:
    """Returns what a new session begins with, by name: one row where a size varies."""
    return {
        state.name: StoredTensor(
            reader,
            state.dtype,
            tuple(size if isinstance(size, int) else 1 for size in state.shape),
            None,
            state.initial,
        )
        for state in reader.manifest.state
    }


def compare_tensors(part: str, a: Mapping[str, StoredTensor], b: Mapping[str, StoredTensor]) -> Iterator[Difference]:
    """Compares tensors by name. Reads only those whose digests differ."""
    for name in dict.fromkeys([*a, *b]):
        one, other = a.get(name), b.get(name)
        here, there = (None if each is None else str(each) for each in (one, other))
        if one is None or other is None or here != there:
            yield Difference(part, name, here, there, "answer")
        elif (greatest := _difference(one, other)) is not None:
            yield Difference(part, name, here, there, "answer", greatest)


def _difference(a: StoredTensor, b: StoredTensor) -> float | None:
    """Returns the greatest difference of two tensors of one type; None if they are the same bytes."""
    digests = [each.record and each.reader.record(each.record).sha256 for each in (a, b)]
    if digests[0] == digests[1] or (one := a.read()) == (other := b.read()):
        return None
    places = range(0, len(one), _CHUNK)
    return max(greatest_difference(a.dtype, one[at : at + _CHUNK], other[at : at + _CHUNK]) for at in places)


def greatest_difference(dtype: str, a: bytes, b: bytes) -> float:
    """Returns the greatest absolute difference of the elements of two tensors of a dtype.

    Two NaNs are equal, and an infinity equals itself. The difference is inf where only one of both is NaN or infinite.
    The real and the imaginary parts of complex elements are compared one by one.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        # A long double holds every integer of 64 bits.
        one, other = (
            each.view(each.real.dtype).astype(np.longdouble) for each in (values_of(dtype, a), values_of(dtype, b))
        )
        difference = np.abs(one - other)
    difference[(one == other) | (np.isnan(one) & np.isnan(other))] = 0
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0))
