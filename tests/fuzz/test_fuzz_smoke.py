"""A short run of what tests/fuzz/run.py does for hours, with mutations of Python's own; see README.md there."""

from __future__ import annotations

import random
from collections import namedtuple

import pytest

from exportkit.errors import ManifestConsistencyError
from exportkit.package import archive, structure
from tests.fuzz import mutations, promises

ROUNDS = 300


def bytewise(chance: random.Random) -> mutations.Bytes:
    def change(data: bytes) -> bytes:
        changed = bytearray(data or b"\0")
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)

    return change


def taken(name: str, rounds: int = ROUNDS) -> int:
    """How many of some mutated inputs are taken."""
    promise, mutate, first = mutations.PROMISES[name]
    chance = random.Random(0)
    return sum(promise(mutate(chance.choice(first), bytewise(chance), chance)) for _ in range(rounds))


@pytest.mark.parametrize("name", mutations.PROMISES)
def test_mutated_inputs_break_no_promise_and_some_are_taken(name: str) -> None:
    promise, _, first = mutations.PROMISES[name]
    assert promise(first[0])
    assert taken(name) > 0


def test_a_name_that_is_checked_too_late_breaks_the_promise_of_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fuzzing found once: the names of a named tuple were checked when the class was made."""
    check = structure.check_named_tuple

    def make(class_name: str, fields: tuple[str, ...]) -> type:
        check(class_name, fields)
        return namedtuple(class_name, fields)

    monkeypatch.setattr(structure, "check_named_tuple", lambda *names: None)
    monkeypatch.setattr(structure, "named_tuple_class", make)
    with pytest.raises(ManifestConsistencyError, match="cannot name a named tuple"):
        promises.manifest(mutations.manifests()[1].replace(b'"Picked"', b'"2.11"'))


def test_a_reader_that_trusts_the_directory_breaks_the_promise_of_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the comparison of the layout left out, zipfile and we see different archives, or other bytes pass."""

    def trusting(fd: int, size: int, headers: list[archive.Header]) -> list[archive.Entry]:
        return [archive.Entry(header.name, header.size, header.crc32, header.offset) for header in headers]

    monkeypatch.setattr(archive, "check_layout", trusting)
    with pytest.raises((AssertionError, OSError, ValueError, NotImplementedError)):
        taken("archive", 3000)
