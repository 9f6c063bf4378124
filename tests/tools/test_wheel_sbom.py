"""The SBOM of the wheel; `make reproducible`, which CI runs, builds one twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.package.test_sbom import assert_valid
from tools.wheel_sbom import wheel_sbom


def test_the_wheels_sbom_names_its_libraries_and_what_built_them(tmp_path: Path) -> None:
    folder = tmp_path / "content"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libx.so").write_bytes(b"\x7fELF and more")
    (folder / "x.py").write_text("")
    content = wheel_sbom(folder, "1.2.3", "MIT", ["torch>=2.11", 'onnx>=1; extra == "onnx"'], None)
    parts = json.loads(content)["packages"]
    assert {"exportkit", "libx.so", "torch", "g++", "setuptools"} == {part["name"] for part in parts}
    assert next(part for part in parts if part["name"] == "libx.so")["packageFileName"] == "lib/libx.so"
    assert_valid(content, tmp_path)


def test_the_description_needs_nothing_that_a_build_lacks() -> None:
    """setup.py runs it where exportkit is not installed."""
    code = "import runpy; runpy.run_path('exportkit/spdx.py'); import sys; assert 'msgspec' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
