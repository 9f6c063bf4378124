"""What a line of the file of API keys says beside its key: a label, and limits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from exportkit.errors import UsageError

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KNOWN = "label=NAME, requests=N, rows=N (both a second), burst=SECONDS, in-flight=N, models=NAME,NAME.METHOD"
_MOST_LABELS = 1024  # the metrics have a few lines for each


@dataclass(frozen=True)
class KeyRules:
    """Who a client with a key is, and what it may do.

    Attributes:
        client: A name that does not tell the key. Keys with the same label have the same.
        label: The name in metrics, logs and traces. Empty: it has none, and is in none of them.
        requests: The requests a second. None: as many as it likes.
        rows: The rows of inferences a second. None: as many as it likes.
        burst: Seconds: so much of both may come at once after a pause.
        in_flight: The most requests that are not answered.
        models: The packages, and the methods of packages, that it may know of. None: all.
    """

    client: str
    label: str = ""
    requests: float | None = None
    rows: float | None = None
    burst: float = 1.0
    in_flight: int | None = None
    models: frozenset[str] | None = None

    @property
    def counted(self) -> bool:
        """Whether each of its requests has to be looked at."""
        return bool(self.label) or self.models is not None or (self.requests, self.rows, self.in_flight) != (None,) * 3

    def sees(self, package: str, name: str) -> bool:
        """Whether it may know of what is served of a package by a name: the package's, or that of a method."""
        return self.models is None or package in self.models or name in self.models


Sees = Callable[[str, str], bool]
"""Whether a client may know of what is served of a package (its name) by a name."""


def sees_all(package: str, name: str) -> bool:
    """There is nothing that the client may not know of."""
    return True


def identity_of(key: bytes) -> str:
    """Returns a name for who has a key, without telling it."""
    return sha256(b"exportkit client " + key).hexdigest()[:32]


def rules_of(key: bytes, words: Iterable[bytes], where: str) -> KeyRules:
    """Reads what stands behind a key.

    Args:
        key: The key.
        words: Each is `name=value`.
        where: The line, for messages.

    Raises:
        UsageError: A word is none of those that are known. The message does not have it: it may be a key.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.decode("ascii", "replace").partition("=")
        read = _READS.get(name) if equals else None
        if read is None:
            raise UsageError(f"{where} has something behind its key that is no limit", hint=f"There may be {_KNOWN}.")
        field = name.replace("-", "_")
        if field in found:
            raise UsageError(f"{where} has {name} twice", hint="Leave one of them out.")
        try:
            found[field] = read(value)
        except ValueError as error:
            raise UsageError(f"{where}: {name} {error}, got {value!r}", hint=f"There may be {_KNOWN}.") from None
    label = found.get("label", "")
    return KeyRules(identity_of(key) if not label else identity_of(b"with the label " + label.encode()), **found)


def check_together(lines: Iterable[tuple[int, KeyRules]], path: object) -> None:
    """Checks the lines of a file, each with its number.

    Raises:
        UsageError: Two are of one client, with different limits; or there are too many labels.
    """
    first: dict[str, tuple[int, KeyRules]] = {}
    for number, rules in lines:
        before, same = first.setdefault(rules.client, (number, rules))
        if same != rules:
            what = f"the label {rules.label}" if rules.label else "the same key"
            raise UsageError(
                f"lines {before} and {number} of {path} have {what} and different limits",
                hint="The keys of one label share its limits: write the same on each line.",
            )
    labels = {rules.label for _, rules in first.values()} - {""}
    if len(labels) > _MOST_LABELS:
        raise UsageError(f"{path} has {len(labels)} labels, and at most {_MOST_LABELS} may be")


def _label(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise ValueError("is up to 64 letters, digits, dots, dashes and underscores")
    return text


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1e-6 <= number <= 1e12:
        raise ValueError("is a number above 0")
    return number


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text[:10]) <= 10**9:
        raise ValueError("is a whole number above 0")
    return int(text)


def _models(text: str) -> frozenset[str]:
    names = text.split(",")
    if not all(names):
        raise ValueError("is names with commas between them")
    return frozenset(names)


_READS: dict[str, Callable[[str], object]] = {
    "label": _label,
    "requests": _number,
    "rows": _number,
    "burst": _number,
    "in-flight": _count,
    "models": _models,
}
