"""A model's sources are compiled by ccache where there is one, without std::regex, and alike in any folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
from torch._inductor import config, cpp_builder

from exportkit.export.compile import model_sources
from exportkit.export.compile.model_sources import compiling_model_sources

# Notes what it is told, and does it.
LOGGING = """#!/bin/sh
echo "$@" >> "{log}"
exec "$@"
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts_process: None) -> Path:
    """What ccache was told, if it is asked: one on the path that keeps nothing."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    program = tmp_path / "bin" / "ccache"
    program.parent.mkdir()
    program.write_text(LOGGING.format(log=tmp_path / "log"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "log"


def _compile(folder: Path, text: str, *, keep: bool = True, **options: object) -> bytes:
    """Compiles the text as a model's kernels in a new folder, and returns the object file."""
    folder.mkdir()
    source = folder / "model.kernel.cpp"
    source.write_text(text)
    chosen = {"cpp.cxx": ("g++",), "cpp.vec_isa_ok": True, **options}
    with config.patch(chosen), compiling_model_sources(keep=keep):
        build = cpp_builder.CppTorchDeviceOptions(device_type="cpu", compile_only=True)
        builder = cpp_builder.CppBuilder(
            name="model.kernel", sources=str(source), output_dir=str(folder), BuildOption=build
        )
        builder.build()
    return Path(builder.get_target_file_path()).read_bytes()


def test_ccache_compiles_the_same_in_any_folder_and_only_where_caches_may_be_used(tmp_path: Path, log: Path) -> None:
    text = "const char* place() { return __FILE__; }\n"
    first = _compile(tmp_path / "1", text)
    assert _compile(tmp_path / "2", text) == first
    told = [line.replace(f"{tmp_path}/{folder}", "") for folder, line in enumerate(log.read_text().splitlines(), 1)]
    assert told[0] == told[1]
    assert b"model.kernel.cpp" in first
    assert str(tmp_path).encode() not in first
    assert _compile(tmp_path / "3", text, force_disable_caches=True) == first
    assert _compile(tmp_path / "4", text, keep=False) == first
    assert len(log.read_text().splitlines()) == 2


def test_torchs_header_parses_devices_without_regex_as_with(tmp_path: Path) -> None:
    """The original expression is the oracle."""
    model_sources.write_header_without_regex(tmp_path)
    header = (tmp_path / model_sources._DEVICE_HEADER).read_text()
    assert "regex" not in re.sub(r"//.*", "", header)
    kinds = ("", "c", "cpu", "cuda", "xpu", "mps", "cpucuda", "CPU", "meta", " cpu", "cuda ")
    ends = ("", ":", ":0", ":17", "::", ":0:", ":-1", ":a", ":1a", ": 1", "0", ":00", ":1 ")
    texts = [kind + end for kind, end in product(kinds, ends)]
    lines = "\n".join(
        f'  {{ const std::string device = "{text}"; const DeviceText parts(device);'
        " puts((std::to_string(parts.matched)"
        ' + (parts.matched ? " " + parts[1].str() + " " + std::to_string(parts[3].matched) + parts[3].str() : ""))'
        ".c_str()); }"
        for text in texts
    )
    source = tmp_path / "main.cpp"
    source.write_text(
        f"#include <cstdio>\n#include <string>\n{model_sources._DEVICE_TEXT}\nint main() {{\n{lines}\n}}\n"
    )
    subprocess.run(["g++", "-std=c++20", str(source), "-o", str(tmp_path / "main")], check=True)
    said = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout.splitlines()
    expression = re.compile("(cpu|cuda|xpu|mps)(:([0-9]+))?")
    expected = []
    for text in texts:
        match = expression.fullmatch(text)
        number = match[3] if match else None
        expected.append(f"1 {match[1]} {int(number is not None)}{number or ''}" if match else "0")
    assert said == expected


def test_a_header_that_torch_changed_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "torch" / "include" / model_sources._DEVICE_HEADER
    header.parent.mkdir(parents=True)
    header.write_text("#include <regex>\nnamespace torch::aot_inductor {\n std::regex re(other); }\n")
    monkeypatch.setattr(model_sources.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    model_sources.write_header_without_regex(tmp_path / "include")
    assert not (tmp_path / "include").exists()
