"""Which C++ compiler is used, and what it and AOTInductor may be told."""

from __future__ import annotations

import _ctypes
import ctypes
import platform
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from exportkit.errors import CompilerError, UsageError
from exportkit.export import cpu_isas
from exportkit.export.artifact import export_aoti
from exportkit.export.compile import usable_compiler
from exportkit.export.compile.compile_plan import read_inductor_config
from exportkit.export.export_options import CompileOptions
from exportkit.export.models.resolve import resolve
from tests.artifacts import artifact

MODELS = str(Path(__file__).with_name("export_models.py"))


@pytest.fixture
def fresh_probe():
    usable_compiler.objection.cache_clear()
    yield
    usable_compiler.objection.cache_clear()


def _program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_slow_compiler_is_waited_for_and_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_probe
) -> None:
    """A loaded machine compiles slowly; advice to install a compiler that is there helps nobody."""
    limits = []
    run = subprocess.run

    def watched(command, **options):
        limits.append(options.get("timeout"))
        return run(command, **options)

    monkeypatch.setattr(usable_compiler.subprocess, "run", watched)
    usable_compiler.objection(_program(tmp_path / "some-g++", "exit 1"))
    assert limits == [None]


@pytest.mark.process
def test_a_compiler_that_asks_something_gets_no_answer(tmp_path: Path, fresh_probe) -> None:
    asks = _program(tmp_path / "asking-g++", "read answer || { echo 'error: nobody answers' >&2; exit 1; }")
    assert "nobody answers" in (usable_compiler.objection(asks) or "")


def test_without_a_compiler_nothing_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_probe) -> None:
    monkeypatch.setattr(usable_compiler.shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    steps: list[str] = []
    with pytest.raises(CompilerError, match=r"no-such-compiler: no such program\n.*apt-get install g\+\+"):
        export_aoti(resolve(f"{MODELS}:structured"), tmp_path / "x.pt2", progress=steps.append)
    assert steps == []


@pytest.mark.process
def test_a_compiler_that_links_libstdcxx_statically_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_probe
) -> None:
    if (usual := shutil.which("g++")) is None:
        # $CXX may be another compiler, and -static-libstdc++ is GCC's.
        pytest.skip("there is no g++, whose -static-libstdc++ this is about")
    static = _program(tmp_path / "static-g++", f'exec {usual} -static-libstdc++ "$@"')
    broken = _program(tmp_path / "broken-g++", "echo 'fatal error: no such header' >&2; exit 1")
    monkeypatch.setenv("CXX", static)
    assert usable_compiler.usable_compiler() != static
    assert "statically" in (usable_compiler.objection(static) or "")
    assert "no such header" in (usable_compiler.objection(broken) or "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_autotun": "1"}, r"no option 'max_autotun'\n.*max_autotune"),
        ({"aot_inductor.package": "0"}, "the package format depends on it"),
        ({"cpp.march": "native"}, "the package format depends on it"),
        ({"cpp.dynamic_threads": "False"}, "the package format depends on it"),
        ({"cpp.threads": "1"}, r"wrong where more threads run it\n.*OMP_NUM_THREADS=1"),
    ],
)
def test_inductor_options_that_are_none_or_not_the_callers_to_set_are_refused(given, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_inductor_config(given)


def test_inductor_options_are_read_as_json_or_python_where_they_are_some() -> None:
    given = {"max_autotune": "true", "epilogue_fusion": "False", "cpp.threads": "3", "cpp.cxx": "clang++"}
    assert read_inductor_config(given) == {
        "max_autotune": True,
        "epilogue_fusion": False,
        "cpp.threads": 3,
        "cpp.cxx": ("clang++",),
    }


def test_an_instruction_set_of_no_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="x86-64-v3 or x86-64-v4"):
        export_aoti(
            resolve(f"{MODELS}:structured"), tmp_path / "x.pt2", compile_options=CompileOptions(cpu_isas=["x86-64-v9"])
        )


@pytest.mark.parametrize(
    ("machine", "isa", "says"),
    [
        ("x86_64", "armv8-a", r"armv8-a is for aarch64; this machine is x86_64\n.*Use x86-64-v3 or x86-64-v4 here"),
        ("aarch64", "x86-64-v3", r"x86-64-v3 is for x86_64; this machine is aarch64\n.*Export on x86_64"),
        (
            "aarch64",
            "armv9-a",
            r"unknown CPU instruction set 'armv9-a'\n.*Use armv8-a or armv8.2-a\+dotprod or",
        ),
        ("riscv64", "armv8-a", r"armv8-a is for aarch64; this machine is riscv64\n.*Use none here"),
    ],
)
def test_an_instruction_set_of_another_machine_is_refused_with_those_of_this_one(
    machine: str, isa: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_isas.platform, "machine", lambda: machine)
    with pytest.raises(UsageError, match=says):
        cpu_isas.check_cpu_isa(isa)


def test_every_machine_has_a_default_among_its_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, default in (("x86_64", "x86-64-v3"), ("aarch64", "armv8-a"), ("riscv64", None)):
        monkeypatch.setattr(cpu_isas.platform, "machine", lambda machine=machine: machine)
        assert cpu_isas.default_cpu_isa() == default
        cpu_isas.check_cpu_isa(default)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the artifact is for x86-64")
def test_the_library_of_a_model_is_unmapped_when_it_is_closed(tmp_path: Path) -> None:
    """Else each new version of a served model would stay in memory, and its symbols would be shared with others."""
    library = tmp_path / "model.so"
    with zipfile.ZipFile(artifact("small-convolutions")) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        library.write_bytes(archive.read(name))
    opened = ctypes.CDLL(str(library))
    assert str(library) in Path("/proc/self/maps").read_text()
    _ctypes.dlclose(opened._handle)
    assert str(library) not in Path("/proc/self/maps").read_text()
