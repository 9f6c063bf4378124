"""What differs between two wheels is named; a build of a whole wheel twice is `make reproducible`, which CI runs."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.package.test_sbom import assert_valid
from tools.reproducible import differences
from tools.wheel_sbom import wheel_sbom


def wheel(path: Path, files: dict[str, bytes], *, year: int = 2020, mode: int = 0o644) -> Path:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0))
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return path


def test_every_difference_of_two_wheels_is_named(tmp_path: Path) -> None:
    files = {"a.py": b"a", "b.so": b"b"}
    one = wheel(tmp_path / "1" / "x.whl", files)
    assert differences(one, wheel(tmp_path / "2" / "x.whl", files)) == []
    for other, said in (
        (wheel(tmp_path / "3" / "x.whl", {**files, "b.so": b"c"}), "content: b.so"),
        (wheel(tmp_path / "4" / "x.whl", {"a.py": b"a"}), "only in one: b.so"),
        (wheel(tmp_path / "5" / "x.whl", files, year=2021), "date_time of a.py"),
        (wheel(tmp_path / "6" / "x.whl", files, mode=0o600), "external_attr of a.py"),
        (wheel(tmp_path / "7" / "x.whl", dict(reversed(files.items()))), "the order of the files"),
        (wheel(tmp_path / "8" / "y.whl", files), "names: x.whl, y.whl"),
    ):
        assert any(said in line for line in differences(one, other)), said


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
