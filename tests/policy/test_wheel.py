"""What a wheel has besides the libraries that its build makes: all of the package, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.artifacts import ROOT

PACKAGE = ROOT / "exportkit"


def test_it_has_the_package_s_sources_and_data_and_nothing_that_an_earlier_build_left(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    copied = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    sources = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    data = {f"exportkit/{name}" for name in ("py.typed", "package/FORMAT.md", "package/stable_abi_2.11.txt")}
    assert copied == sources | data
