"""Compares the tensors that two packages store, by name, with NumPy alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from exportkit.inspect.difference import Difference
from exportkit.package.archive import PackageReader
from exportkit.package.dtypes import ITEM_BYTES, values_of

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
