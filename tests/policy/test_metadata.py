"""What pyproject.toml says of the project is what the documents and the code say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import exportkit

tomllib = pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()


def test_the_version_is_the_code_s():
    assert PROJECT["version"] == exportkit.__version__


def test_the_oldest_python_is_the_one_that_the_classifiers_and_the_readme_name():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    named = [found for line in PROJECT["classifiers"] if (found := re.search(r"Python :: (3\.\d+)$", line))]
    assert min((found[1] for found in named), key=lambda version: int(version.partition(".")[2])) == oldest
    assert f"Python {oldest} or newer" in README


def test_the_oldest_torch_is_the_one_that_the_readme_names():
    (torch,) = [line for line in PROJECT["dependencies"] if line.startswith("torch")]
    assert f"torch {torch.removeprefix('torch>=')} or newer" in README


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
