"""The state of many sequences in blocks of memory, so that a batch takes its rows out of them by one copy a tensor."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Manifest, Size
from exportkit.runtime.model import Model
from exportkit.runtime.session import Session

_BLOCK_BYTES = 4 << 20
_MOST_ROWS = 256
_ALIGNMENT = 64  # of each row, as of a tensor of its own


class StateBlock:
    """A block of rows.

    Attributes:
        tensors: The state, in the manifest's order, with all rows.
        returned: Rows that nobody uses any more, by their first and their number. Any thread may append.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], rows: int) -> None:
        self.tensors = tensors
        self.returned: deque[tuple[int, int]] = deque()
        self._taken = bytearray(rows)

    def take(self, count: int) -> int:
        """Returns the first of so many rows that follow one another; -1: there are none."""
        self._clear_returned()
        start = self._taken.find(bytes(count))
        if start >= 0:
            self._taken[start : start + count] = b"\1" * count
        return start

    @property
    def empty(self) -> bool:
        """Whether nobody has any of its rows."""
        self._clear_returned()
        return not any(self._taken)

    def _clear_returned(self) -> None:
        while self.returned:
            start, number = self.returned.popleft()
            self._taken[start : start + number] = bytes(number)


class Rows:
    """Rows of a block, which go back when the last reference to this is gone: no batch that runs loses them."""

    __slots__ = ("block", "count", "start")

    def __init__(self, block: StateBlock, start: int, count: int) -> None:
        self.block = block
        self.start = start
        self.count = count

    def __del__(self) -> None:
        self.block.returned.append((self.start, self.count))


class StateRows:
    """The blocks of a model. Any thread may use it."""

    def __init__(self, model: Model, dimension: str) -> None:
        """`dimension` is the first size of each tensor of the state, and no other's."""
        self._model = model
        self._dimension = dimension
        self._lock = threading.Lock()
        self._blocks: list[StateBlock] = []
        self._shapes = _row_shapes(model.manifest)
        self._dtypes: list[torch.dtype] = [getattr(torch, each.dtype) for each in model.manifest.state]
        self._rows = _rows_of_a_block(model.manifest)

    def open(self, sizes: Mapping[str, int]) -> tuple[Session, Rows | None]:
        """Makes a session. Its rows are None where it has memory of its own: they are large, or not aligned."""
        count = sizes[self._dimension]
        if not 0 < count <= self._rows // 2:
            return self._model.session(**sizes), None
        rows = self._taken(count)
        tensors = [tensor[rows.start : rows.start + count] for tensor in rows.block.tensors]
        return self._model.session_over(tensors, sizes), rows

    def _taken(self, count: int) -> Rows:
        with self._lock:
            for block in self._blocks:
                if (start := block.take(count)) >= 0:
                    return Rows(block, start, count)
            # Blocks that are empty go, but for those that are here already.
            self._blocks = [block for block in self._blocks if not block.empty]
            block = StateBlock(self.new(self._rows), self._rows)
            self._blocks.append(block)
            return Rows(block, block.take(count), count)

    def new(self, rows: int) -> list[torch.Tensor]:
        """Returns tensors of the state with so many rows, without values."""
        device = self._model.device
        with torch.inference_mode(False):
            return [
                torch.empty((rows, *shape), dtype=dtype, device=device)
                for shape, dtype in zip(self._shapes, self._dtypes)
            ]


def _row_shapes(manifest: Manifest) -> list[list[int]]:
    return [[size for size in each.shape[1:] if not isinstance(size, Size)] for each in manifest.state]


def _rows_of_a_block(manifest: Manifest) -> int:
    """Returns how many rows a block has; 0: the state of each session has memory of its own."""
    sizes = [math.prod(shape) * ITEM_BYTES[each.dtype] for shape, each in zip(_row_shapes(manifest), manifest.state)]
    if any(size % _ALIGNMENT for size in sizes):
        return 0
    rows = min(_MOST_ROWS, _BLOCK_BYTES // max(1, sum(sizes)))
    return rows if rows > 1 else 0


def in_blocks(manifest: Manifest, dimension: str | None) -> bool:
    """Whether the state of most sequences lies in blocks. `dimension` is that whose rows are independent."""
    return dimension is not None and _rows_of_a_block(manifest) > 0
