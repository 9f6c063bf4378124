"""bin/exportkit-run starts the exportkit-run of the torch that lies beside exportkit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from exportkit.libraries import LIBRARY_DIR
from tests.runtime import exportkit_run

LAUNCHER = LIBRARY_DIR.with_name("bin") / "exportkit-run"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder in which packages are installed, with the launcher and programs for two torches that only say so."""
    exportkit_run.require_built()
    (tmp_path / "exportkit" / "bin").mkdir(parents=True)
    shutil.copy2(LAUNCHER, tmp_path / "exportkit" / "bin")
    for minor in ("2.9", "2.10"):
        program = tmp_path / "exportkit" / "lib" / f"torch{minor}" / "exportkit-run"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\necho {minor} "$@"\n')
        program.chmod(0o755)
    (tmp_path / "torch").mkdir()
    return tmp_path


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = site / "exportkit" / "bin" / "exportkit-run"
    return subprocess.run([program, *arguments], env={}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("version", "minor"), [("2.9.1+cu130", "2.9"), ("2.10.0a0+git12", "2.10"), ("2.10", "2.10")])
def test_the_torch_beside_it_chooses_the_program(site: Path, version: str, minor: str) -> None:
    (site / "torch" / "version.py").write_text(f"from typing import Optional\n\n__version__ = '{version}'\ncuda = 1\n")
    done = run(site, "a b", "--json")
    assert (done.returncode, done.stdout) == (0, f"{minor} a b --json\n")


def test_a_torch_that_it_was_not_built_for_is_named(site: Path) -> None:
    (site / "torch" / "version.py").write_text("__version__ = '2.99.0'\n")
    done = run(site)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(f"exportkit-run: there is no {site}/exportkit/lib/torch2.99/exportkit-run")
    assert "torch 2.99" in done.stderr
    assert "hint: `make build`" in done.stderr


def test_with_no_torch_beside_it_the_torch_of_the_build_counts(site: Path) -> None:
    shutil.rmtree(site / "torch")
    done = run(site)
    assert done.returncode == 4
    assert "exportkit/lib/torch2." in done.stderr
