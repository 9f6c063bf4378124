"""Libraries of other projects are built from a copy of their sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.try_libraries import build


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two projects beside each other. One reads a file of the folder above it, and writes one; the other fails."""
    folder = tmp_path / "sources"
    for name, setup in {
        "good": "import sys; open('good/built', 'w').write(open('../README.md').read() + ' '.join(sys.argv[1:]))",
        "bad": "raise SystemExit('no compiler')",
    }.items():
        (folder / name / name).mkdir(parents=True)
        (folder / name / name / "__init__.py").touch()
        (folder / name / "setup.py").write_text(setup)
    (folder / "README.md").write_text("read, ")
    return folder


@pytest.mark.process
def test_a_library_is_built_in_a_copy_of_its_sources(sources: Path, tmp_path: Path) -> None:
    before = sorted(sources.rglob("*"))
    place = build("good", sources, tmp_path)
    assert place is not None
    assert (place / "good" / "built").read_text() == "read, -q build_ext --inplace"
    assert sorted(sources.rglob("*")) == before


@pytest.mark.process
def test_a_build_that_fails_says_what_it_said(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no compiler"):
        build("bad", sources, tmp_path)
    assert build("missing", sources, tmp_path) is None
