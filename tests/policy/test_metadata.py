"""What pyproject.toml says of the project is what the documents and the code say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

import exportkit
from exportkit.support import (
    EXPORTING_TORCHES,
    NEWEST_TORCH,
    OLDEST_TORCH,
    OTHER_TORCHES,
    PINNED_TORCH,
    PYTHONS,
    exporting_torches,
)

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
README = (ROOT / "README.md").read_text()
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]


def prose(name: str) -> str:
    """A document without its line breaks."""
    return " ".join((ROOT / name).read_text().split())


def test_the_version_is_the_code_s():
    assert PROJECT["version"] == exportkit.__version__


def test_the_packaging_names_the_supported_pythons():
    named = [found[1] for line in PROJECT["classifiers"] if (found := re.search(r"Python :: (3\.\d+)$", line))]
    assert tuple(named) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{PYTHONS[0].replace('.', '')}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == PYTHONS[0]


def test_continuous_integration_runs_the_supported_versions():
    assert tuple(JOBS["tests"]["strategy"]["matrix"]["python"]) == PYTHONS
    assert JOBS["newest-torch"]["env"]["TORCH"].rpartition(".")[0] == NEWEST_TORCH
    assert tuple(JOBS["other-torch"]["strategy"]["matrix"]["torch"]) == tuple(f"{torch}.*" for torch in OTHER_TORCHES)


def test_a_build_asks_for_the_supported_versions():
    major, minor = PYTHONS[0].split(".")
    assert f"sys.version_info < ({major}, {minor})" in (ROOT / "Makefile").read_text()
    assert f"exportkit needs Python {PYTHONS[0]} or newer" in (ROOT / "Makefile").read_text()
    for needed in (PYPROJECT["build-system"]["requires"], PROJECT["dependencies"]):
        assert f"torch>={OLDEST_TORCH}" in needed
    assert re.search(rf"^torch=={PINNED_TORCH}\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert PINNED_TORCH in EXPORTING_TORCHES
    target = re.search(r'^TARGET_TORCH = "0x(..)(..)', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert target is not None
    assert f"{int(target[1], 16)}.{int(target[2], 16)}" == OLDEST_TORCH
    assert (ROOT / "exportkit" / "package" / f"stable_abi_{OLDEST_TORCH}.txt").exists()


def test_the_documents_name_the_supported_versions():
    assert f"Python {PYTHONS[0]} or newer" in README
    assert f"torch {OLDEST_TORCH} or newer; torch {exporting_torches()} exports" in prose("README.md")
    assert f"Python {PYTHONS[0]} or newer" in (ROOT / "docs" / "tutorial.md").read_text()
    release = prose("RELEASE.md")
    assert f"| loads packages | {PYTHONS[0]} or newer | {OLDEST_TORCH} or newer |" in release
    assert f"| exports | {PYTHONS[0]} or newer | {exporting_torches()} |" in release
    assert f"| {', '.join(PYTHONS)} | {PINNED_TORCH} (CPU) |" in release
    assert f"| every change: `make test` | 3.12 | {NEWEST_TORCH} (CPU) |" in release
    assert f"| {', '.join(OTHER_TORCHES)} |" in release


def test_the_readme_names_every_extra_that_a_user_needs():
    for extra in PROJECT["optional-dependencies"].keys() - {"dev", "interop"}:
        assert f"`{extra}`" in README


def test_the_platform_is_named():
    assert "Operating System :: POSIX :: Linux" in PROJECT["classifiers"]
    assert "Linux on x86-64" in README


def test_pages_that_the_urls_name_are_there():
    for url in PROJECT["urls"].values():
        _, found, path = url.partition("/blob/main/")
        assert not found or (ROOT / path).is_file()


def test_the_changelog_has_a_place_for_what_is_not_released():
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
