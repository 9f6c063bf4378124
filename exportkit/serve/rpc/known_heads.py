"""Requests that differ from one before in their id and in the elements of their inputs alone are not read again.

The steps of a sequence are such requests. What stands before `raw_input_contents` is looked up as it is, without the
id: only bytes that were read as a whole message before, and have no id, are ever found.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from exportkit.serve.engine.checked_request import RequestForm
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.rpc.rpc_stream import Message
from exportkit.serve.rpc.wire import field_head

_NAME, _VERSION, _ID = 0x0A, 0x12, 0x1A  # the first byte of these fields of ModelInferRequest
_MOST_BYTES = 512  # of a head
_MOST_HEADS, _MOST_TAILS = 8192, 8


@dataclass(eq=False, slots=True)
class KnownHead:
    """What stands before the elements of a request's inputs.

    Attributes:
        step: The sequence.
        priority: As of the request.
        parts: For each input, the bytes before its elements, and their number.
        model: Who answered the request, unless it is gone: a reference that does not keep it.
        form: What it found out of it.
    """

    step: SequenceStep
    priority: int
    parts: Sequence[tuple[bytes, int]]
    model: weakref.ref[ServedModel]
    form: RequestForm
    keys: dict[str, tuple[str, int | str]] = field(default_factory=dict)

    def key(self, owner: str) -> tuple[str, int | str]:
        """Returns the sequence's key for a client."""
        known = self.keys.get(owner)
        if known is None:
            self.keys.clear()
            known = self.keys[owner] = (owner, self.step.id)
        return known


class Found(NamedTuple):
    """A request whose head is known, and who answers it."""

    head: KnownHead
    model: ServedModel
    id: str
    data: list[memoryview]


class KnownHeads:
    """The heads of requests that were answered."""

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}
        self._tails: list[int] = []  # the lengths of what stands behind heads
        self._models: weakref.WeakSet[ServedModel] = weakref.WeakSet()  # those of which heads are known

    def find(self, message: Message) -> Found | None:
        """Returns what is known of a request."""
        for tail in self._tails:
            end = len(message) - tail
            if not 0 < end <= _MOST_BYTES:
                continue
            key, identity = _without_id(message[:end])
            head = self._heads.get(key)
            if head is None or (model := head.model()) is None:
                continue
            if (data := _data(message, end, head.parts)) is not None:
                return Found(head, model, identity, data)
        return None

    def learn(self, message: Message, sizes: Sequence[int], id: str) -> tuple[bytes, list[tuple[bytes, int]]] | None:
        """Returns the key and the parts of a request, whose inputs have so many bytes, if it can be known.

        `id` is the one that was read.
        """
        parts = [(field_head(7, size), size) for size in sizes]
        tail = sum(len(before) + size for before, size in parts)
        end = len(message) - tail
        if not 0 < end <= _MOST_BYTES or _data(message, end, parts) is None:
            return None
        key, found = _without_id(message[:end])
        return (key, parts) if found == id else None

    def add(self, key: bytes, head: KnownHead) -> None:
        """Remembers a head."""
        if len(self._heads) >= _MOST_HEADS:
            self._heads.clear()
        model = head.model()
        if model is not None and model not in self._models:
            self._models.add(model)
            weakref.finalize(model, self._forget).atexit = False
        self._heads[key] = head
        tail = sum(len(before) + size for before, size in head.parts)
        if tail not in self._tails:
            self._tails = [tail, *self._tails][:_MOST_TAILS]

    def _forget(self) -> None:
        """Forgets the heads of a model that is gone, with what it found out of them."""
        self._heads = {key: head for key, head in self._heads.items() if head.model() is not None}


def _without_id(head: Message) -> tuple[bytes, str]:
    """Returns a head without its id, and the id, if it is where clients put it."""
    at = 0
    for kind in (_NAME, _VERSION):
        if at + 1 < len(head) and head[at] == kind and head[at + 1] < 0x80:
            at += 2 + head[at + 1]
    if at + 1 >= len(head) or head[at] != _ID or head[at + 1] >= 0x80:
        return bytes(head), ""
    end = at + 2 + head[at + 1]
    try:
        return bytes(head[:at] + head[end:]), head[at + 2 : end].decode()
    except UnicodeDecodeError:
        return b"", ""


def _data(message: Message, at: int, parts: Sequence[tuple[bytes, int]]) -> list[memoryview] | None:
    view, found = memoryview(message), []
    for before, size in parts:
        start = at + len(before)
        if message[at:start] != before:
            return None
        at = start + size
        found.append(view[start:at])
    return found if at == len(message) else None
