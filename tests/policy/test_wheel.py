"""What is distributed: a wheel has all of the package and nothing else, a source distribution what builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.artifacts import ROOT

DATA = {f"exportkit/{name}" for name in ("py.typed", "package/FORMAT.md", "package/stable_abi_2.11.txt")}


def files(folder: str, pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern) if path.is_file()}


def setup(*arguments: str) -> None:
    subprocess.run([sys.executable, "setup.py", "-q", *arguments], cwd=ROOT, check=True, capture_output=True)


def test_a_wheel_has_sources_and_data_and_nothing_that_an_earlier_build_left(tmp_path: Path) -> None:
    setup("build_py", "--build-lib", str(tmp_path))  # what the build of the libraries adds its own to
    copied = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert copied == files("exportkit", "*.py") | DATA


def test_a_source_distribution_has_all_that_its_build_compiles(tmp_path: Path) -> None:
    setup("egg_info", "--egg-base", str(tmp_path))
    listed = set((tmp_path / "exportkit.egg-info" / "SOURCES.txt").read_text().splitlines())
    needed = files("csrc", "*") | files("exportkit", "*.py") | DATA
    assert needed | {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= listed
    assert not [name for name in listed if name.endswith(".so") or name.startswith(("build/", ".cache/"))]
