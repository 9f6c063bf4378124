"""Compares tensors where they are stored: in packages, exported programs, ONNX models and recorded cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from exportkit.diff.difference import Difference, Effect, paired
from exportkit.diff.elements import greatest_difference, in_order
from exportkit.errors import DigestMismatchError
from exportkit.package.archive import PackageReader
from exportkit.package.dtypes import ITEM_BYTES, SAFETENSORS_DTYPES
from exportkit.package.manifest import Weight

_CHUNK = 1 << 22  # bytes; a multiple of every element's size


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        dtype: torch's name of the dtype, or another name for elements that are only compared as bytes.
        shape: The sizes.
        strides: The strides of the elements in the file, which have no gaps.
        size: The number of bytes in the file; None if they are not there.
        read: Returns some of the bytes, given the offset and the count.
        sha256: The digest of the bytes, if it is known without reading them.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int | None
    read: Callable[[int, int], bytes]
    sha256: str | None = None

    def __post_init__(self) -> None:
        """Checks that the bytes can be the elements.

        Raises:
            ValueError: There are more or fewer bytes than the sizes say, or a stride leads out of them.
        """
        count, width = prod(self.shape), ITEM_BYTES.get(self.dtype)
        if width is None or self.size is None:
            return
        # The place of the last element, if no size and no stride is negative.
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides)) if count else 0
        fits = self.size == count * width and last < max(count, 1)
        if not fits or len(self.shape) != len(self.strides) or min((*self.shape, *self.strides), default=0) < 0:
            raise ValueError(f"{self} with strides {list(self.strides)} has {self.size} bytes")

    def chunks(self) -> Iterator[bytes]:
        """Yields the bytes in the order of the file."""
        size = self.size or 0
        for offset in range(0, size, _CHUNK):
            yield self.read(offset, min(_CHUNK, size - offset))

    def in_order(self) -> Iterator[bytes]:
        """Yields the bytes in the order of the indices, at once if that is not the order of the file."""
        if self.strides == contiguous(self.shape):
            yield from self.chunks()
        else:
            whole = in_order(b"".join(self.chunks()), self.dtype, self.shape, self.strides)
            yield from (whole[offset : offset + _CHUNK] for offset in range(0, len(whole), _CHUNK))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{', which no code reads' if self.size is None else ''}"


def held(content: bytes) -> Callable[[int, int], bytes]:
    """Reads from memory."""
    return lambda offset, count: content[offset : offset + count]


def in_file(descriptor: int, start: int) -> Callable[[int, int], bytes]:
    """Reads from an open file in which the tensor begins at `start`."""

    def read(offset: int, count: int) -> bytes:
        content = os.pread(descriptor, count, start + offset)
        if len(content) < count:
            raise DigestMismatchError("a file was shortened while it was compared", hint="Compare it again.")
        return content

    return read


def packaged_weights(reader: PackageReader) -> dict[str, StoredTensor]:
    """Returns the weights of a package by the names of the model's state, constants by AOTInductor's names."""
    found: dict[str, StoredTensor] = {}
    for weight in reader.manifest.weights:
        tensor = _weight(reader, weight)
        names = (weight.name, *weight.aliases)
        if not weight.state and (short := weight.name.rpartition("@")[0]) and short not in found:
            names = (short,)
        found |= dict.fromkeys(names, tensor)
    return found


def _weight(reader: PackageReader, weight: Weight) -> StoredTensor:
    if weight.record is None:
        return StoredTensor(weight.dtype, weight.shape, weight.strides, None, held(b""))
    read, record = in_file(reader.fileno(), reader.data_offset(weight.record)), reader.record(weight.record)
    return StoredTensor(weight.dtype, weight.shape, weight.strides, record.size, read, record.sha256)


def initial_tensors(reader: PackageReader) -> dict[str, StoredTensor]:
    """Returns what the state of a package begins with, by name: one row where a size varies."""
    found = {}
    for state in reader.manifest.state:
        shape = tuple(size if isinstance(size, int) else 1 for size in state.shape)
        if state.initial is None:
            size = prod(shape) * ITEM_BYTES[state.dtype]
            zeros = StoredTensor(state.dtype, shape, contiguous(shape), size, lambda _, count: bytes(count))
            found[state.name] = zeros
            continue
        record = reader.record(state.initial)
        read = in_file(reader.fileno(), reader.data_offset(state.initial))
        found[state.name] = StoredTensor(state.dtype, shape, contiguous(shape), record.size, read, record.sha256)
    return found


def case_tensors(content: bytes) -> dict[str, StoredTensor]:
    """Returns the tensors of a recorded case by name.

    Raises:
        ValueError: It is not a safetensors file.
    """
    from safetensors import SafetensorError, deserialize

    try:
        tensors = deserialize(content)
    except SafetensorError as error:
        raise ValueError(f"it is not a safetensors file: {error}") from error
    found = {}
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        data, dtype = bytes(tensor["data"]), SAFETENSORS_DTYPES.get(tensor["dtype"], tensor["dtype"])
        found[name] = memory_tensor(dtype, tensor["shape"], data)
    return found


def memory_tensor(dtype: str, shape: Sequence[int], content: bytes) -> StoredTensor:
    """Makes a contiguous tensor over bytes in memory."""
    return StoredTensor(dtype, tuple(shape), contiguous(shape), len(content), held(content))


def compare_tensors(
    part: str, kind: str, a: Mapping[str, StoredTensor], b: Mapping[str, StoredTensor], effect: Effect | None
) -> Iterator[Difference]:
    """Compares tensors by name. Reads only those whose digests differ or are unknown."""
    known: dict[tuple[int, int], float | None] = {}  # tied weights are read once
    for found in paired(part, kind, a, b, effect):
        if isinstance(found, Difference):
            yield found
            continue
        name, one, other = found
        what = f"{kind} {name}".strip()
        if str(one) != str(other):
            yield Difference(part, what, str(one), str(other), effect)
            continue
        key = id(one), id(other)
        if key not in known:
            known[key] = _difference(one, other)
        if (greatest := known[key]) is not None:
            note = None if one.dtype in ITEM_BYTES else "compared as bytes"
            yield Difference(part, what, str(one), str(other), effect, note, None if note else greatest)


def _difference(a: StoredTensor, b: StoredTensor) -> float | None:
    """Returns the greatest difference of two tensors of the same dtype and shape; None if they are the same bytes."""
    same_order = a.strides == b.strides
    if a.sha256 is not None and a.sha256 == b.sha256 and same_order:
        return None
    greatest: float | None = None
    for one, other in zip(*((a.chunks(), b.chunks()) if same_order else (a.in_order(), b.in_order()))):
        if one != other:
            here = greatest_difference(a.dtype, one, other) if a.dtype in ITEM_BYTES else 0.0
            greatest = max(greatest or 0.0, here)
    return greatest


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
