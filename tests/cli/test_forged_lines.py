"""A package's strings are whatever its maker wrote: none of them looks like what exportkit says of the package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from exportkit.cli import main
from tests.adversarial import forge

FORGED = "x\nFORGED ok: 9 calls agree\r\x85\u2028\x0b\x1cFORGED signed by y\n  FORGED\x1b[2K\u202e"
_MOVES = set("\r\x85\u2028\x0b\x1c\x1b\u202e")


def hostile(whole: forge.Document, within: str | None = None) -> Iterator[tuple[str, forge.Document]]:
    """The manifest with each of its strings, keys and lists of strings in turn replaced or joined by FORGED."""
    for place in forge.places(whole)[1:]:
        if within not in (None, place[0]) or any(isinstance(step, int) and step > 0 for step in place):
            continue  # the first of a list will do
        *parents, last = place
        parent = forge.value_at(whole, parents)
        if isinstance(parent, dict):
            renamed = {FORGED if key == last else key: value for key, value in parent.items()}
            yield f"{place} renamed", forge.replaced(whole, parents, renamed)
            yield f"{place} joined", forge.replaced(whole, parents, {**parent, FORGED: parent[last]})
        if isinstance(parent[last], str):
            yield f"{place} replaced", forge.replaced(whole, place, FORGED)


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
        path.write_bytes(forge.package(document, forge.SIDECAR_RECORDS) if sidecar else forge.package(document))
        text = said(capsys, "inspect", str(path))
        check(text, what)
        shown += "FORGED" in text
    assert shown > (3 if sidecar else 20)  # most are refused without being repeated


@pytest.mark.parametrize(
    "paths",
    [
        ["version", "source.model", "provenance.commit"],  # which may be any text
        ["targets.0.name"],
        ["libraries.0.record"],
        ["operators.0.schema"],
    ],
    ids=str,
)
def test_no_string_of_a_manifest_forges_a_line_of_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], paths: list[str]
) -> None:
    document = forge.document()
    for path in paths:
        document = forge.changed(path, FORGED, document)
    file = tmp_path / "x.pt2"
    file.write_bytes(forge.package(document))
    check(said(capsys, "verify", str(file), "--device", "cpu"), str(paths))
