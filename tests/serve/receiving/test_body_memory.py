"""Memory of bodies: parts do not overlap, are aligned, live as long as somebody refers to them, and no longer."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exportkit.serve.receiving.body_memory import BodyMemory, FreeParts, MappedMemory, new_body_memory
from exportkit.serve.statuses import QueueFullError

BYTES = 1 << 30


class FreePartsMachine(RuleBasedStateMachine):
    """Compares with a list of bytes that are taken or not."""

    SIZE = 64

    def __init__(self) -> None:
        super().__init__()
        self.parts = FreeParts(self.SIZE)
        self.taken = [False] * self.SIZE
        self.held: list[tuple[int, int]] = []

    @rule(size=st.integers(1, 24))
    def take(self, size: int) -> None:
        fits = (i for i in range(self.SIZE - size + 1) if not any(self.taken[i : i + size]))
        first = next(fits, None)
        assert self.parts.take(size) == first
        if first is not None:
            self.taken[first : first + size] = [True] * size
            self.held.append((first, size))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start, size = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.parts.give_back(start, size)
        self.taken[start : start + size] = [False] * size

    @invariant()
    def the_end_of_what_is_used_is_known(self) -> None:
        assert self.parts.used == max((i + 1 for i, taken in enumerate(self.taken) if taken), default=0)


FreePartsMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestFreeParts = FreePartsMachine.TestCase


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = new_body_memory(BYTES)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def memory(descriptor: int) -> BodyMemory:
    return BodyMemory(descriptor)


def allocated(descriptor: int) -> int:
    """The memory that the file has, in bytes."""
    return os.fstat(descriptor).st_blocks * 512


@pytest.mark.parametrize("start", [0, 1, 63, 64, 257])
@pytest.mark.parametrize("size", [0, 1, 64, 1000])
def test_the_byte_that_is_named_lies_at_a_multiple_of_64(memory: BodyMemory, start: int, size: int) -> None:
    memory.allocate(3)
    part = memory.allocate(size + start, start)
    assert part.nbytes == size + start
    if part.nbytes:
        assert (np.frombuffer(part, np.uint8).ctypes.data + start) % 64 == 0


def test_both_processes_see_the_same(descriptor: int, memory: BodyMemory) -> None:
    held = memory.allocate(100)
    part = memory.allocate(1000, 7)
    part[:] = os.urandom(1000)
    offset = memory.offset_of(part[10:])
    assert offset is not None
    assert held.nbytes == 100
    assert bytes(MappedMemory(descriptor).view(offset, 990)) == bytes(part[10:])


def test_a_part_lives_as_long_as_what_was_made_of_it(memory: BodyMemory) -> None:
    part = memory.allocate(400)
    offset = memory.offset_of(part)
    tensor = torch.from_numpy(np.frombuffer(part[:40], np.float32))
    del part
    gc.collect()
    assert memory.offset_of(memory.allocate(400)) != offset
    del tensor
    assert memory.offset_of(memory.allocate(400)) == offset


def test_other_memory_has_no_offset(memory: BodyMemory) -> None:
    assert memory.offset_of(memoryview(bytearray(10))) is None
    assert memory.offset_of(memoryview(b"")) == 0


def test_no_room_is_429(memory: BodyMemory) -> None:
    held = memory.allocate(BYTES - 64)
    with pytest.raises(QueueFullError, match="no memory is free for a body of 65 bytes"):
        memory.allocate(65)
    assert held.nbytes == BYTES - 64


def test_a_size_that_is_announced_takes_no_memory_and_a_rush_gives_it_back(descriptor: int, memory: BodyMemory) -> None:
    parts = [memory.allocate(300 << 20) for _ in range(3)]
    assert allocated(descriptor) == 0
    for part in parts:
        np.frombuffer(part, np.uint8)[:: os.sysconf("SC_PAGE_SIZE")] = 1
    assert allocated(descriptor) > 890 << 20
    del part, parts
    memory.tidy()
    assert allocated(descriptor) <= 256 << 20


@pytest.mark.parametrize(("offset", "size"), [(BYTES - 1, 2), (-10, 5), (100, -5), (-(1 << 40), 1 << 40)])
def test_what_leaves_the_memory_is_refused(descriptor: int, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="of 1073741824"):
        MappedMemory(descriptor).view(offset, size)


def test_nobody_cuts_the_memory_off_under_a_model_that_reads_it(descriptor: int) -> None:
    for size in (0, BYTES - 1, BYTES + 1):
        with pytest.raises(PermissionError):
            os.truncate(descriptor, size)
    plain = os.memfd_create("plain", os.MFD_CLOEXEC)
    os.truncate(plain, BYTES)
    with pytest.raises(ValueError, match="could be shrunk"):
        MappedMemory(plain)
    os.close(plain)
