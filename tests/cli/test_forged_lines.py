"""A package's strings are whatever its maker wrote: none of them looks like what exportkit says of the package."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exportkit.cli import main
from tests.adversarial import forge

FORGED = "x\nFORGED ok: 9 calls agree\r\x85\u2028\x0b\x1cFORGED signed by y\n  FORGED\x1b[2K\u202e"
_MOVES = set("\r\x85\u2028\x0b\x1c\x1b\u202e")


def hostile(whole: forge.Document, within: str | None = None) -> Iterator[tuple[str, forge.Document]]:
    """The manifest with each of its strings, keys and lists of strings in turn replaced or joined by FORGED."""
    for place in _places(whole, ()):
        if within not in (None, place[0]):
            continue
        changed = copy.deepcopy(whole)
        *parents, last = place
        parent: Any = changed
        for step in parents:
            parent = parent[step]
        if isinstance(parent, dict):
            yield (
                f"{place} renamed",
                _with(changed, parents, {FORGED if k == last else k: v for k, v in parent.items()}),
            )
            yield f"{place} joined", _with(changed, parents, {**parent, FORGED: parent[last]})
        if isinstance(parent[last], str):
            replaced = copy.deepcopy(parent)
            replaced[last] = FORGED
            yield f"{place} replaced", _with(changed, parents, replaced)


def _places(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in steps:
        if not (isinstance(value, list) and step > 0):  # the first of a list will do
            yield (*place, step)
            yield from _places(item, (*place, step))


def _with(whole: forge.Document, place: list[Any], value: Any) -> forge.Document:
    if not place:
        return value
    changed = copy.deepcopy(whole)
    parent: Any = changed
    for step in place[:-1]:
        parent = parent[step]
    parent[place[-1]] = value
    return changed


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    captured = capsys.readouterr()
    return captured.out + captured.err


def check(text: str, what: str) -> None:
    assert not _MOVES & set(text), what
    for line in text.split("\n"):
        assert not line.lstrip(" ").startswith("FORGED"), (what, line)


@pytest.mark.parametrize("sidecar", [False, True])
def test_no_string_of_a_manifest_forges_a_line_of_inspect(
    sidecar: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, shown = tmp_path / "x.pt2", 0
    for what, document in hostile(forge.sidecar(), "onnx") if sidecar else hostile(forge.document()):
        path.write_bytes(forge.package(document, forge.sidecar_records()) if sidecar else forge.package(document))
        text = said(capsys, "inspect", str(path))
        check(text, what)
        shown += "FORGED" in text
    assert shown > (3 if sidecar else 20)  # most are refused without being repeated


@pytest.mark.process
@pytest.mark.parametrize(
    "places",
    [
        [("version",), ("source", "model"), ("provenance", "commit")],  # which may be any text
        [("targets", 0, "name")],
        [("libraries", 0, "record")],
        [("operators", 0, "schema")],
    ],
    ids=str,
)
def test_no_string_of_a_manifest_forges_a_line_of_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], places: list[tuple[Any, ...]]
) -> None:
    document = forge.document()
    for *parents, last in places:
        parent: Any = document
        for step in parents:
            parent = parent[step]
        parent[last] = FORGED
    path = tmp_path / "x.pt2"
    path.write_bytes(forge.package(document))
    check(said(capsys, "verify", str(path), "--device", "cpu"), str(places))
