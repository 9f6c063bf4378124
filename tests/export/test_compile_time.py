"""Work that commands do without: precompiled headers, compilers one after the other, imports of torch's compiler."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from torch._inductor import config, cpp_builder

from exportkit.errors import CompilerError
from exportkit.export.artifact import export_aoti
from exportkit.export.compile.model_sources import compiling_model_sources
from exportkit.export.models.resolve import resolve
from tests.subprocesses import run_interpreter

MODELS = str(Path(__file__).with_name("export_models.py"))

# Notes its arguments, and that it waits for the other source: a compiler that is run alone gives up.
MEETING = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in
  *.wrapper.cpp*) mine=wrapper other=kernel ;;
  *.kernel.cpp*) mine=kernel other=wrapper ;;
  *) exec {gxx} "$@" ;;
esac
touch "{folder}/$mine"
waited=0
while [ ! -e "{folder}/$other" ]; do
  waited=$((waited + 1))
  [ $waited -gt 3000 ] && echo "error: $mine was compiled alone" >&2 && exit 1
  sleep 0.1
done
exec {gxx} "$@" -O0
"""


@pytest.fixture
def meeting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a compiler that compiles one of a model's sources only while the other one is compiled too."""
    if (gxx := shutil.which("g++")) is None:
        pytest.skip("there is no g++")
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    folder, log = tmp_path / "compiler", tmp_path / "log"
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(MEETING.format(log=log, folder=folder, gxx=gxx))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return log


@pytest.mark.process
def test_all_sources_are_compiled_once_at_the_same_time_without_precompiled_headers(
    tmp_path: Path, meeting_compiler: Path
) -> None:
    before = cpp_builder.CppBuilder.build
    export_aoti(resolve(f"{MODELS}:structured"), tmp_path / "x.pt2")
    commands = meeting_compiler.read_text()
    assert [_compilations(commands, source) for source in ("wrapper", "kernel")] == [1, 1]
    assert "c++-header" not in commands
    assert cpp_builder.CppBuilder.build is before
    export_aoti(resolve(f"{MODELS}:structured"), tmp_path / "again.pt2")
    assert (tmp_path / "again.pt2").read_bytes() == (tmp_path / "x.pt2").read_bytes()
    commands = meeting_compiler.read_text()
    assert [_compilations(commands, source) for source in ("wrapper", "kernel")] == [1, 1]


def _compilations(commands: str, source: str) -> int:
    return sum(f".{source}.cpp" in line and " -c " in line for line in commands.splitlines())


@pytest.mark.process
@pytest.mark.parametrize("source", ["wrapper", "kernel"])
def test_what_the_compiler_says_of_either_source_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    compiler = tmp_path / "g++"
    refuses = f'*.{source}.cpp*) echo "error: not this {source}" >&2; exit 1 ;;'
    takes = '*" -c "*) for object; do :; done; touch "$object" ;;'  # nobody links it
    compiler.write_text(f'#!/bin/sh\ncase "$*" in\n{refuses}\n{takes}\n*) exec {shutil.which("g++")} "$@" ;;\nesac\n')
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(CompilerError, match=f"error: not this {source}"):
        export_aoti(resolve(f"{MODELS}:structured"), tmp_path / "x.pt2")
    assert not (tmp_path / "x.pt2").exists()


@pytest.mark.process
def test_other_builds_are_not_put_off(tmp_path: Path) -> None:
    """Inductor patches the object file of large weights as soon as `build` returns."""
    source = tmp_path / "model.weights.cpp"
    source.write_text("int weights[] = {1, 2, 3};")
    with compiling_model_sources(), config.patch({"cpp.cxx": (os.environ.get("CXX", "g++"),), "cpp.vec_isa_ok": True}):
        options = cpp_builder.CppTorchDeviceOptions(device_type="cpu", compile_only=True)
        builder = cpp_builder.CppBuilder(
            name="model.weights", sources=str(source), output_dir=str(tmp_path), BuildOption=options
        )
        builder.build()
        assert Path(builder.get_target_file_path()).stat().st_size


def test_packaging_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    code = "import sys, exportkit.packaging; print(*(name for name in sys.modules if name.startswith('torch')))"
    assert run_interpreter(code, cwd=tmp_path).split() == []
