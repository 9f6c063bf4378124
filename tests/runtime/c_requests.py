"""Requests of exportkit.h by ctypes. This imports neither torch nor exportkit."""

from __future__ import annotations

import ctypes as c
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.runtime.c_interface import CODES, CPU, Model, Refused
from tests.runtime.c_structures import (
    Answers,
    DataType,
    Device,
    Ended,
    Piece,
    Place,
    Request,
    RequestInput,
    RunOptions,
)

BFLOAT = 4
OF_KIND = {**CODES, "V": BFLOAT}  # numpy has no bfloat16: here its bits are numpy's void
LIBC = c.CDLL(None)
KINDS = {code: kind for kind, code in OF_KIND.items()}


@dataclass
class Ask:
    """One request.

    Attributes:
        inputs: The inputs' values.
        cuts: By input, the bytes at which it is cut into pieces; a piece of no bytes where two are equal.
        session: The number of its session.
    """

    inputs: Sequence[np.ndarray]
    cuts: Sequence[Sequence[int]] = ()
    session: int = 0
    _memory: list[Any] = field(default_factory=list)

    def c(self) -> Request:
        """The structure, which this object keeps alive."""
        cuts = [*self.cuts, *[()] * (len(self.inputs) - len(self.cuts))]
        inputs = (RequestInput * max(len(self.inputs), 1))(*map(self._input, self.inputs, cuts))
        request = Request(c.sizeof(Request), len(self.inputs), inputs, self.session, 1)
        self._memory += [inputs, request]
        return request

    def _input(self, array: np.ndarray, cuts: Sequence[int]) -> RequestInput:
        content, ends = array.tobytes(), [*cuts, array.nbytes]
        parts = [guarded(content[start:end]) for start, end in zip([0, *cuts], ends)] if cuts else [array]
        pieces = (Piece * len(parts))(*(Piece(part.ctypes.data, part.nbytes, Device(CPU, 0)) for part in parts))
        shape = (c.c_int64 * array.ndim)(*array.shape)
        self._memory += [parts, shape, pieces]
        return RequestInput(
            DataType(OF_KIND[array.dtype.kind], array.itemsize * 8, 1), array.ndim, shape, len(pieces), pieces
        )


def guarded(content: bytes) -> np.ndarray:
    """Memory with these bytes, behind which is none: what reads or writes beyond its end crashes."""
    end = -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, end + mmap.PAGESIZE), np.uint8)
    assert LIBC.mprotect(c.c_void_p(memory.ctypes.data + end), c.c_size_t(mmap.PAGESIZE), 0) == 0
    made = memory[end - len(content) : end]
    made[:] = np.frombuffer(content, np.uint8)
    return made


class Gathered:
    """Where answers go, in memory of the CPU.

    Attributes:
        outputs: By request and output.
        ended: The requests that have ended, in this order.
        place: Gives a negative number, 0, or None to take the output.
    """

    def __init__(self, place: Callable[[int, int], int | None] = lambda request, output: None) -> None:
        self.outputs: dict[tuple[int, int], np.ndarray] = {}
        self.ended: list[int] = []
        self.place = place
        self.c = Answers(c.sizeof(Answers), Place(self._place), Ended(self._ended))

    def _ended(self, request: int, context: object) -> None:
        self.ended.append(request)

    def _place(
        self,
        request: int,
        output: int,
        dtype: DataType,
        ndim: int,
        shape: Any,
        size: int,
        data: Any,
        device: Any,
        _: object,
    ) -> int:
        assert (request, output) not in self.outputs, "asked twice"
        assert request not in self.ended
        if (wanted := self.place(request, output)) is not None:
            return wanted
        kind = "?" if KINDS[dtype.code] == "b" else f"{KINDS[dtype.code]}{dtype.bits // 8}"
        noise = np.full(shape[:ndim], 99, dtype=kind)
        made = self.outputs[request, output] = guarded(noise.tobytes()).view(kind).reshape(noise.shape)
        assert made.nbytes == size
        data[0] = made.ctypes.data
        device[0] = Device(CPU, 0)
        return 1


def run_requests(
    model: Model,
    asks: Sequence[Ask],
    most: int = 0,
    method: str | None = None,
    answers: Gathered | None = None,
    **options: Any,
) -> list[list[np.ndarray] | Refused]:
    """Runs requests, and returns for each its outputs or why it has none."""
    structures = [ask.c() for ask in asks]
    pointers = (c.POINTER(Request) * max(len(asks), 1))(*map(c.pointer, structures))
    answers = answers or Gathered()
    given = RunOptions(size=c.sizeof(RunOptions), **options)
    name = None if method is None else method.encode()
    model.library.call(
        "run_requests", model.handle, name, pointers, len(asks), most, c.byref(answers.c), c.byref(given)
    )
    assert sorted(answers.ended) == list(range(len(asks)))
    results: list[list[np.ndarray] | Refused] = []
    for index, request in enumerate(structures):
        if request.error is not None:
            results.append(model.library.taken(c.c_void_p(request.error)))
            continue
        results.append([answers.outputs[key] for key in sorted(answers.outputs) if key[0] == index])
    return results


def codes(results: Sequence[object]) -> list[int]:
    """Of each request the code of its error, or 0."""
    return [result.code if isinstance(result, Refused) else 0 for result in results]


def equal(answer: object, wanted: Sequence[np.ndarray]) -> bool:
    """Whether an answer has these bits."""
    assert isinstance(answer, list), answer
    return len(answer) == len(wanted) and all(
        one.shape == other.shape and one.tobytes() == other.tobytes() for one, other in zip(answer, wanted)
    )


def try_rows(model: Model, most: int, method: str | None = None) -> tuple[int, str | None]:
    """The most rows of a call; and why each request runs by itself, if it does."""
    rows, reason = c.c_int64(-1), c.c_char_p(b"?")
    name = None if method is None else method.encode()
    model.library.call("try_rows", model.handle, name, most, c.byref(rows), c.byref(reason))
    return rows.value, None if reason.value is None else reason.value.decode()
