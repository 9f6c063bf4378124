"""Every promise of docs/promises.md names the test that proves it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "promises.md").read_text()
_PROMISE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize(("path", "name"), sorted(set(_PROMISE.findall(TEXT))), ids=lambda part: part)
def test_every_promise_names_a_test_that_is_there(path: str, name: str):
    assert re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_the_promises_are_many_and_each_has_a_test():
    promises = re.findall(r"^- .+(?:\n  .+)*", TEXT, re.MULTILINE)
    assert len(promises) > 30
    for promise in promises:
        assert re.search(r"\\\n  `", promise), f"the test stands on a line of its own: {promise}"
        assert _PROMISE.search(promise), promise
