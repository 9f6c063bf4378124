"""A fixture that asks the C++ runtime too wherever a test asks whether a package is trusted, or reads a public key."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from exportkit.errors import ExportkitError
from exportkit.package import policy, trust
from exportkit.package.archive import PackageReader
from exportkit.package.keys import PublicKey, read_public_key
from tests.cpp_reader import program


def trusted_twice(
    reader: PackageReader, public_key: Any = None, signature: str | os.PathLike[str] | None = None
) -> tuple[PublicKey, ...]:
    """`check_trust`, and the same in C++."""
    single = public_key is None or isinstance(public_key, (str, os.PathLike))
    keys = [public_key] if single else list(public_key)
    if not keys:  # which C++ has no way to say
        return trust.check_trust(reader, public_key, signature)
    words = [policy.SYSTEM_POLICY, reader.path, signature or "", *(key for key in keys if key is not None)]
    with _same_verdict(_ask("trust", *words)):
        return trust.check_trust(reader, public_key, signature)


def read_twice(source: str | os.PathLike[str]) -> PublicKey:
    """`read_public_key`, and the same in C++."""
    answer = _ask("key", source)
    with _same_verdict(answer):
        key = read_public_key(source)
    assert answer["value"] == key.id
    return key


@pytest.fixture(autouse=True)
def both_trust(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_trust` and `read_public_key` have the same verdict in C++, down to the words, in every test beside it.

    `from tests.both_trust import both_trust` in a conftest.py is all that those need.
    """
    program()  # or the reason why there is none
    twice: dict[str, Callable[..., Any]] = {"check_trust": trusted_twice, "read_public_key": read_twice}
    for name, function in twice.items():
        if hasattr(request.module, name):
            monkeypatch.setattr(request.module, name, function)


def _ask(*words: object) -> dict[str, Any]:
    # A process each time: what a policy is depends on its environment and its folder.
    done = subprocess.run([program(), *map(str, words)], capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


class _same_verdict:
    """The block raises what C++ said, or nothing if it took it."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            assert "ok" in self._answer, self._answer
        elif isinstance(error, ExportkitError):
            assert self._answer.get("error") == type(error).__name__, (self._answer, error)
            _same_words(error, self._answer)


def _same_words(error: ExportkitError, answer: dict[str, Any]) -> None:
    """All of them, but those of a library's error, which is the cause: each parser has its own."""
    message = answer["message"].encode("latin1").decode()
    assert answer["hint"] == (error.hint or "")
    if error.__cause__ is None:
        assert message == error.message
        return
    of_cause = getattr(error.__cause__, "message", str(error.__cause__)).partition("\n")[0].rstrip(".")
    assert message.startswith(error.message.split(of_cause)[0].rstrip(" ("))
