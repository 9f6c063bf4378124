"""What the documents say is what the code does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = {"exportkit/runtime.h"}  # an installed header: csrc/runtime/include has it
NOT_OURS = {".venv", ".cache", "build", ".pytest_cache"}
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not NOT_OURS & set(path.parts) and path.parent.name != "site"  # Sphinx checks their links
)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(path: Path):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", path.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            there = path.parent / target if target else path
            assert there.exists(), f"{path.name} links to {target}"
            assert not anchor or anchor in anchors(there), f"{path.name} links to {target}#{anchor}"


def anchors(path: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_of_the_decisions_has_each_of_them_with_its_title():
    folder = ROOT / "docs" / "adr"
    titles = {path.name: path.read_text().splitlines()[0] for path in folder.glob("[0-9]*.md")}
    rows = re.findall(r"^- \[(\d+)\]\((.+)\) (.+)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert {name: f"# {number}: {title}" for number, name, title in rows} == titles


def test_files_named_in_the_documents_exist():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "csrc" / "arr_coc" / "common" / "README.md"]:
        for name in re.findall(r"`((?:tests|benchmarks|exportkit|csrc|docs|tools)/[\w./-]+\.\w+)`", path.read_text()):
            if name not in BUILT:
                assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_the_index_of_the_documents_names_each_page_once():
    folder = ROOT / "docs"
    pages = [path.relative_to(folder).as_posix() for path in (*folder.glob("*.md"), *folder.glob("evidence/*.md"))]
    named = re.findall(r"^\| \[.+?\]\(((?!adr/).+?)\)", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(set(pages) - {"README.md"})


def test_every_picture_is_on_a_page():
    pages = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    pictures = [path.name for path in (ROOT / "docs").rglob("*") if path.suffix in (".png", ".svg")]
    assert [name for name in pictures if name not in pages] == []


def test_the_documents_are_at_most_40_000_words():
    """README.md and all pages of docs/, generated ones too, counted like `wc -w`; but for the reports to torch."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in pages if page.parent.name != "upstream"]
    assert sum(len(page.read_text().split()) for page in pages) <= 40_000


def test_the_index_of_the_operators_helpers_names_each_header_once_and_nothing_else():
    folder = ROOT / "csrc" / "arr_coc" / "common"
    named = re.findall(r"^\| `([\w.]+)` \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in folder.iterdir() if path.name != "README.md")


def test_no_source_is_longer_than_a_reader_can_hold():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sources = [ROOT / name for name in tracked if name.endswith((".py", ".h", ".cpp", ".cu", ".cuh"))]
    too_long = {p.name: n for p in sources if p.exists() and (n := len(p.read_text().splitlines())) > 450}
    assert not too_long


def test_messages_that_the_page_on_trouble_quotes_are_the_code_s():
    files = [ROOT / "setup.py", *ROOT.glob("exportkit/**/*.py"), *ROOT.glob("csrc/**/*.cpp")]
    code = "\n".join(re.sub(r'"\s*f?"', "", path.read_text()) for path in files)  # literals over several lines
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [part for row in rows for text in re.findall(r"`([^`]+)`", row) for part in text.split(" ... ")]
    assert len(quoted) > 8
    assert [part for part in quoted if part not in code] == []
