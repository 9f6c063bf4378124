"""What the documents say is what the code does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from exportkit.bench import document
from exportkit.ops._table import with_table

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not {".venv", ".cache", "build", ".pytest_cache"} & set(path.parts)
)


def test_the_readme_has_the_operator_table_of_the_specs():
    readme = (ROOT / "README.md").read_text()
    assert "<!-- operators" in readme
    assert with_table(readme) == readme, "stale: run `make docs`"


def test_the_documents_have_the_numbers_of_the_committed_results():
    readme, found = (ROOT / "README.md").read_text(), document.load_results()
    assert "<!-- performance" in readme
    assert document.with_performance(readme, found) == readme, "stale: run `make docs`"
    assert document.PERFORMANCE.read_text() == document.performance(found), "stale: run `make docs`"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(path: Path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_decision_is_in_the_index():
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text()
    for path in folder.glob("[0-9]*.md"):
        assert path.name in index


def test_files_named_in_the_documents_exist():
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for name in re.findall(r"`((?:tests|benchmarks|exportkit|csrc|docs)/[\w./-]+\.\w+)`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_no_source_is_longer_than_a_reader_can_hold():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sources = [ROOT / name for name in tracked if name.endswith((".py", ".h", ".cpp", ".cu", ".cuh"))]
    too_long = {p.name: n for p in sources if p.exists() and (n := len(p.read_text().splitlines())) > 450}
    assert not too_long
