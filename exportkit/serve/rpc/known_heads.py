"""Requests that differ from one before in what the steps of sequences differ in are not read again.

That is the request's id, the sequence, and the elements of the inputs. What stands before `raw_input_contents` is read
without protobuf, and found only if the rest of it was read as a whole message before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from exportkit.serve.engine.checked_request import RequestForm
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.rpc.rpc_stream import Message
from exportkit.serve.rpc.step_heads import MOST_HEAD, read_head
from exportkit.serve.rpc.wire import field_head

_NAME, _VERSION, _ID = 0x0A, 0x12, 0x1A  # the first byte of these fields of ModelInferRequest
_MOST_FORMS, _MOST_HEADS, _MOST_TAILS = 1024, 8192, 8


@dataclass(eq=False, slots=True)
class KnownForm:
    """What the requests of many sequences have in common.

    Attributes:
        priority: As of a request.
        parts: For each input, the bytes before its elements, and their number.
        model: Who answered the first one, unless it is gone: a reference that does not keep it.
        form: What it found out of it.
        asked: The name, the version and the method that the requests say.
    """

    priority: int
    parts: Sequence[tuple[bytes, int]]
    model: weakref.ref[ServedModel]
    form: RequestForm
    asked: tuple[str, str, str | None]


@dataclass(eq=False, slots=True)
class _KnownHead:
    known: KnownForm
    step: SequenceStep

    def owned_by(self, owner: str) -> SequenceStep:
        """Returns the step as a client's."""
        step = self.step
        if step.owner != owner:
            step = self.step = SequenceStep(step.id, step.start, step.end, owner)
        return step


class Found(NamedTuple):
    """A request whose head is known, and who answers it."""

    head: _KnownHead
    model: ServedModel
    id: str
    data: list[memoryview]

    @property
    def known(self) -> KnownForm:
        """What is known of it."""
        return self.head.known

    @property
    def step(self) -> SequenceStep:
        """Which step of which sequence it is."""
        return self.head.step


class KnownHeads:
    """The heads of requests that were answered."""

    def __init__(self) -> None:
        """None is known yet."""
        self._forms: dict[bytes, KnownForm] = {}
        self._heads: dict[bytes, _KnownHead] = {}  # of those, with a sequence but without an id
        self._tails: list[int] = []  # the lengths of what stands behind heads
        self._models: weakref.WeakSet[ServedModel] = weakref.WeakSet()  # those of which forms are known

    def find(self, message: Message) -> Found | None:
        """Returns what is known of a request."""
        for tail in self._tails:
            end = len(message) - tail
            if not 0 < end <= MOST_HEAD:
                continue
            key, identity = _without_id(message[:end])
            head = self._heads.get(key)
            if head is None or (model := head.known.model()) is None:
                continue
            if (data := _data(message, end, head.known.parts)) is not None:
                return Found(head, model, identity, data)
        return self._read(message) if self._forms else None

    def _read(self, message: Message) -> Found | None:
        read = read_head(message)
        known = None if read is None else self._forms.get(read.form)
        if read is None or known is None or (model := known.model()) is None:
            return None
        data = _data(message, read.data, known.parts)
        if data is None:
            return None
        head = _KnownHead(known, read.step)
        key, identity = _without_id(message[: read.data])
        if not (read.step.start or read.step.end) and identity == read.id:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            self._heads[key] = head
        return Found(head, model, read.id, data)

    def learn(
        self, message: Message, sizes: Sequence[int], id: str, step: SequenceStep
    ) -> tuple[bytes, list[tuple[bytes, int]]] | None:
        """Returns the form and the parts of a request, whose inputs have so many bytes, if it can be known.

        `id` and `step` are what was read.
        """
        parts = [(field_head(7, size), size) for size in sizes]
        read = read_head(message)
        if read is None or read.id != id or read.step != step or _data(message, read.data, parts) is None:
            return None
        return read.form, parts

    def add(self, form: bytes, known: KnownForm) -> KnownForm:
        """Remembers a form. Returns it, or what is known of it already."""
        model = known.model()
        if model is not None and (found := self.of(form, model)) is not None:
            return found
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
            self._heads.clear()
        if model is not None and model not in self._models:
            self._models.add(model)
            weakref.finalize(model, self._forget).atexit = False
        old = self._forms.get(form)
        if old is not None:  # of a model that was exchanged
            self._heads = {key: head for key, head in self._heads.items() if head.known is not old}
        self._forms[form] = known
        tail = sum(len(before) + size for before, size in known.parts)
        if tail not in self._tails:
            self._tails = [tail, *self._tails][:_MOST_TAILS]
        return known

    def of(self, form: bytes, model: ServedModel) -> KnownForm | None:
        """Returns what is known of a form of a model."""
        known = self._forms.get(form)
        return known if known is not None and known.model() is model else None

    def _forget(self) -> None:
        """Forgets the heads of a model that is gone, with what it found out of them."""
        self._forms = {key: known for key, known in self._forms.items() if known.model() is not None}
        self._heads = {key: head for key, head in self._heads.items() if head.known.model() is not None}


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
