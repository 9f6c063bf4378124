"""Imports point one way, and the light parts stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_imports_point_one_way():
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([lint, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("exportkit", ["torch", "click", "rich"]),
        ("exportkit.cli", ["torch", "rich"]),
        ("exportkit.package.archive", ["torch", "exportkit.ops"]),
        ("exportkit.runtime", ["exportkit.ops", "exportkit.models", "exportkit.export", "click", "rich"]),
    ],
)
def test_importing_a_part_does_not_import(module: str, forbidden: list[str]):
    code = f"import sys, {module}; print([m for m in {forbidden!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
