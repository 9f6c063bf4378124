"""Every command, and every block of Python or C++, in README.md and docs/ does what the page says."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.policy.documents import INSTALLED, RUNNABLE, Block, Document, agrees, chains, documents, run
from tests.subprocesses import commands

DOCUMENTS = documents()
BLOCKS = [pytest.param(d, b, id=f"{d.name}:{b.line}") for d in DOCUMENTS for b in d.blocks if b.language in RUNNABLE]
README = next(document for document in DOCUMENTS if document.name == "README.md")


def _chains() -> list[Any]:
    """With every change those whose commands compile nothing are tried; the rest is slow."""
    return [
        pytest.param(
            chain,
            id="+".join(document.name for document in chain),
            marks=() if chain[0].name == "docs/operator-check.md" else pytest.mark.slow,
        )
        for chain in chains()
    ]


@pytest.mark.parametrize("chain", _chains())
def test_documents_do_what_they_say(chain: list[Document], tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    # The README's commands are the installed programs, so that these are tested too.
    with nullcontext(INSTALLED) if README in chain else commands("exportkit", "python", "pytest") as programs:
        for document in chain:
            run(document, folder, tmp_path / "cache", programs)


@pytest.mark.parametrize(("document", "block"), BLOCKS)
def test_every_block_is_run_or_says_why_not(document: Document, block: Block):
    assert block.marker is not None, "say what happens to this block: see tests/policy/documents.py"
    kind, _, argument = block.marker.partition(": ")
    assert kind in ("run", "file", "in", "not run")
    if kind in ("file", "in", "not run"):
        assert argument
    if kind == "in":
        assert lines(block.text) in lines((document.path.parent / argument).read_text())
    if kind == "run":
        assert block.language in ("console", "python")
    if block.obstacle is not None:
        pytest.skip(block.obstacle)


def lines(text: str) -> str:
    """The text without indentation."""
    return "\n".join(line.strip() for line in text.splitlines())


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        (["a  1.2 MB"], ["a  3.4 MB"], True),
        (["took 3 ms"], ["took 1200.5 ms"], True),
        (["difference 2.7e-07"], ["difference 3.1e-05"], True),
        (["difference 2.7e-07"], ["difference 3e-07"], True),
        (["torch 2.13.0+cpu"], ["torch 2.11.0+cu130"], True),
        (["a    b"], ["a b"], True),
        (["ok: 4 calls agree"], ["ok: 3 calls agree"], False),
        (["ok: 4 calls and 16 edge cases agree"], ["ok: 4 calls and 15 edge cases agree"], True),
        (["ok: 4 calls and 16 edge cases agree"], ["ok: 4 calls agree"], False),
        (["a"], ["a", "b"], False),
        (["a", "b"], ["a"], False),
        (["a", "..."], ["a", "b", "c"], True),
        (["...", "c"], ["a", "b", "c"], True),
        (["...", "b"], ["a", "b", "c"], False),
        (["a", "...", "c"], ["a", "c"], True),
    ],
)
def test_output_agrees_but_for_what_a_machine_decides(shown: list[str], printed: list[str], expected: bool):
    assert agrees(shown, printed) is expected


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("$ true\n$ echo so; exit 3\n$ true\n", "page.md:2: `echo so; exit 3` exited with 3\nso"),
        ("$ echo 'open\n", "page.md:2: `echo 'open` exited with 2.*unexpected EOF"),
        ("$ X=new && \\\n  echo is $X\nis old\n", "is new\n\nand the document shows\nis old"),
    ],
    ids=["fails", "cannot be read", "prints something else"],
)
def test_a_command_that_does_not_what_the_page_says_is_named(
    block: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.policy.documents.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"<!-- run -->\n```console\n{block}```\n")
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        run(Document(tmp_path / "page.md"), tmp_path, tmp_path)


def test_every_document_that_runs_something_is_run():
    running = [document for document in DOCUMENTS if any(block.runs for block in document.blocks)]
    assert sorted(d.name for chain in chains() for d in chain) == sorted(document.name for document in running)


def test_the_readme_is_short_and_leads_to_every_answer():
    text = README.path.read_text()
    assert len(text.encode()) <= 9000
    for question in ("own-models", "own-operators", "cpp", "performance", "troubleshooting", "production"):
        assert f"](docs/{question}.md" in text
    for folder in ("csrc/package", "csrc/runtime", "exportkit/runtime", "csrc/arr_coc", "exportkit/arr_coc/ops"):
        assert folder in text
    assert "## Installation" in text
