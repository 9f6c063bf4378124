"""A model's sources are compiled by ccache where it is installed, and to the same bytes in any folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from torch._inductor import config, cpp_builder

from exportkit.export.compiling.model_sources import compiling_model_sources

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
