"""Reads mistakes.txt: what is typed, what must be said, and how the advice is followed.

An advice is followed as a script would: what it says is taken out of the message and typed. A mistake is a block:

    $ COMMAND       what is typed
    code CODE       its exit code
    says TEXT       what it must say; repeatable
    never TEXT      what it must not say; repeatable
    early           it is said before torch is imported
    fresh           in a process of its own, because it loads operators
    slow            `make test` leaves it out
    with NAME=VALUE an environment variable
    then HOW ...    how the advice is followed: one of the functions below, with its words. All that is typed then must
                    succeed. Without it, the advice is for a person.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("mistakes.txt")
EARLY = "importing torch"
_FIELDS = ("code", "says", "never", "early", "fresh", "slow", "with", "then")
_OPTION = re.compile(r"(--[a-z][a-z-]*)(?: ('[^']*'|[\w./:=\[\],*+-]+))?")
_MEANT = re.compile(r"Did you mean ('[^']*'|[^\s?]+)\?")
_COMMAND = re.compile(r"((?:mkdir|python|exportkit) .+)$", re.MULTILINE)


@dataclass(frozen=True)
class Mistake:
    """A mistake. mistakes.txt has the fields under these names."""

    typed: str
    number: int
    code: int
    says: Sequence[str]
    never: Sequence[str]
    fresh: bool
    slow: bool
    settings: Mapping[str, str]
    then: str | None

    @property
    def name(self) -> str:
        """A name for the test."""
        words = re.sub(r"'|--input|float32|--draft|exportkit ", "", self.typed)
        return f"{self.number} {re.sub('[^a-zA-Z0-9_.]+', '-', words)[:60]}"

    def lines_by_advice(self, said: str) -> list[str]:
        """Returns what is typed by the advice."""
        if self.then is None:
            return []
        how, _, words = self.then.partition(" ")
        return FOLLOW[how](self.typed, said, words)


def mistakes() -> list[Mistake]:
    """Returns the mistakes of the table."""
    found = []
    for number, block in enumerate(TABLE.read_text().strip().split("\n\n"), 1):
        first, *lines = [line for line in block.splitlines() if not line.startswith("#")]
        given: dict[str, list[str]] = {key: [] for key in _FIELDS}
        for line in lines:
            key, _, text = line.partition(" ")
            given[key].append(text)
        never = [*given["never"], *(EARLY for _ in given["early"])]
        settings = dict(text.split("=", 1) for text in given["with"])
        code, then = int(given["code"][0]), next(iter(given["then"]), None)
        typed, fresh, slow = first.removeprefix("$ "), bool(given["fresh"]), bool(given["slow"])
        found.append(Mistake(typed, number, code, given["says"], never, fresh, slow, settings, then))
    return found


def options(typed: str, said: str, _: str) -> list[str]:
    """Adds the options that the last line names; one for the same place stands in for the old one."""
    words = shlex.split(typed)
    advice = [line for line in said.splitlines() if _OPTION.search(line)][-1]
    for option, value in _OPTION.findall(advice):
        new = [option, *shlex.split(value.rstrip("."))]
        place = new[-1].partition("=")[0]
        old = [i for i, word in enumerate(words) if words[i - 1] == option and word.partition("=")[0] == place]
        words = [word for i, word in enumerate(words) if not {i, i + 1} & set(old)] + new
    return [shlex.join(words)]


def meant(typed: str, said: str, wrong: str) -> list[str]:
    """Types what was meant in place of what was wrong."""
    match = _MEANT.search(said)
    assert match, said
    return [typed.replace(wrong, match[1].strip("'"), 1)]


def first(typed: str, said: str, _: str) -> list[str]:
    """Types the command that the advice is, and then again what was typed."""
    return [_COMMAND.findall(said)[-1], typed]


def only(typed: str, said: str, words: str) -> list[str]:
    """Types the command that the advice is, with a word of it replaced, and more options."""
    old, new, *more = words.split(" ")
    return [" ".join([_COMMAND.findall(said)[-1].replace(old, new), *more])]


def converted(typed: str, said: str, _: str) -> list[str]:
    """Types the command that writes other weights, and then what was typed with these."""
    (command,) = _COMMAND.findall(said)
    *_others, old, new = shlex.split(command)
    return [command, typed.replace(old, new)]


def written(typed: str, said: str, model: str) -> list[str]:
    """Types the command that writes the weights of a checkpoint, and then a model's name with these."""
    (command,) = _COMMAND.findall(said)
    *_others, old, new = shlex.split(command)
    return [command, f"{typed.replace(old, model)} --weights {new}"]


def add(typed: str, _: str, words: str) -> list[str]:
    """Adds an option whose value a person chooses by the advice."""
    return [f"{typed} {words}"]


def change(typed: str, _: str, words: str) -> list[str]:
    """Changes what a person changes by the advice."""
    old, new = words.split(" -> ")
    return [typed.replace(old, new, 1)]


FOLLOW: Mapping[str, Callable[[str, str, str], list[str]]] = {
    function.__name__: function for function in (options, meant, first, only, converted, written, add, change)
}
