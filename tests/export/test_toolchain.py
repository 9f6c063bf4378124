"""Which C++ compiler is used, what it may be told, and how a model's sources are compiled: at a time, once, alike."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import platform
import re
import shutil
import subprocess
import zipfile
from itertools import product
from pathlib import Path

import pytest
from torch._inductor import config, cpp_builder

from exportkit.errors import CompilerError, UsageError
from exportkit.export import cpu_isas
from exportkit.export.artifact import export_aoti
from exportkit.export.compile import model_sources, usable_compiler
from exportkit.export.compile.compile_plan import read_inductor_config
from exportkit.export.compile.model_sources import compiling_model_sources
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
        ({"cpp.simdlen": "8"}, "exportkit sets it"),
        ({"freezing": True}, "freezing: weights that can be swapped need exportkit's value"),
        ({"joint_graph_constant_folding": True}, "weights that can be swapped need exportkit's value"),
        ({"always_keep_tensor_constants": True}, "weights that can be swapped need exportkit's value"),
        ({"cpp.threads": "1"}, r"wrong where more threads run it\n.*OMP_NUM_THREADS=1"),
    ],
)
def test_inductor_options_that_are_none_or_not_the_callers_to_set_are_refused(given, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_inductor_config(given)


def test_inductor_options_are_read_as_json_or_python_where_they_are_some() -> None:
    given = {"max_autotune": "true", "epilogue_fusion": "False", "cpp.threads": "3", "cpp.cxx": "clang++"}
    read = {"max_autotune": True, "epilogue_fusion": False, "cpp.threads": 3, "cpp.cxx": ("clang++",)}
    assert read_inductor_config(given) == read
    assert read_inductor_config({"cpp.simdlen": "1"}) == {"cpp.simdlen": 1}  # a vector's length can only be one
    assert read_inductor_config({"freezing": True}, embed_weights=True) == {"freezing": True}


@pytest.mark.parametrize(
    ("machine", "isa", "says"),
    [
        ("x86_64", "armv8-a", r"armv8-a is for aarch64; this machine is x86_64\n.*Use x86-64-v3 or x86-64-v4 here"),
        ("aarch64", "x86-64-v3", r"x86-64-v3 is for x86_64; this machine is aarch64\n.*Export on x86_64"),
        ("aarch64", "armv9-a", r"unknown CPU instruction set 'armv9-a'\n.*Use armv8-a or armv8.2-a\+dotprod or"),
        ("x86_64", "x86-64-v9", "x86-64-v3 or x86-64-v4"),
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


@pytest.mark.slow
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


# --- all sources at a time -------------------------------------------------------------------------------------------


# Notes its arguments, and that it waits for the other source: a compiler that is run alone gives up.
MEETING = """echo "$@" >> "{log}"
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
    gxx = shutil.which("g++")
    assert gxx is not None, "the package under test was compiled with g++"
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    folder, log = tmp_path / "compiler", tmp_path / "log"
    folder.mkdir()
    monkeypatch.setenv("CXX", _program(folder / "g++", MEETING.format(log=log, folder=folder, gxx=gxx)))
    return log


@pytest.mark.slow
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


@pytest.mark.slow_but("kernel")
@pytest.mark.parametrize("source", ["wrapper", "kernel"])
def test_what_the_compiler_says_of_either_source_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    refuses = f'*.{source}.cpp*) echo "error: not this {source}" >&2; exit 1 ;;'
    takes = '*" -c "*) for object; do :; done; touch "$object" ;;'  # nobody links it
    compiler = f'case "$*" in\n{refuses}\n{takes}\n*) exec {shutil.which("g++")} "$@" ;;\nesac'
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    monkeypatch.setenv("CXX", _program(tmp_path / "g++", compiler))
    with pytest.raises(CompilerError, match=f"error: not this {source}"):
        export_aoti(resolve(f"{MODELS}:structured"), tmp_path / "x.pt2")
    assert not (tmp_path / "x.pt2").exists()


# --- with ccache, without std::regex ---------------------------------------------------------------------------------


# Notes what it is told, and does it.
LOGGING = """echo "$@" >> "{log}"
exec "$@"
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ccache was told, if it is asked: one on the path that keeps nothing."""
    assert shutil.which("g++") is not None, "the package under test was compiled with g++"
    program = tmp_path / "bin" / "ccache"
    program.parent.mkdir()
    _program(program, LOGGING.format(log=tmp_path / "log"))
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "log"


def _compile(folder: Path, text: str, *, name: str = "model.kernel", keep: bool = True, **options: object) -> bytes:
    """Compiles the text in a new folder, and returns the object file."""
    folder.mkdir()
    source = folder / f"{name}.cpp"
    source.write_text(text)
    chosen = {"cpp.cxx": ("g++",), "cpp.vec_isa_ok": True, **options}
    with config.patch(chosen), compiling_model_sources(keep=keep):
        build = cpp_builder.CppTorchDeviceOptions(device_type="cpu", compile_only=True)
        builder = cpp_builder.CppBuilder(name=name, sources=str(source), output_dir=str(folder), BuildOption=build)
        builder.build()
        if name != "model.kernel":  # what is no source of the model is there as soon as `build` returns
            return Path(builder.get_target_file_path()).read_bytes()
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
    assert _compile(tmp_path / "5", "int weights[] = {1, 2, 3};", name="model.weights")


@pytest.mark.slow
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
