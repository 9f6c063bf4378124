"""A model's sources are compiled once for the same code, without std::regex, and to the same bytes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
from torch._inductor import config, cpp_builder, exc

from exportkit.export.compiling import lean_sources, model_sources
from exportkit.export.compiling.model_sources import compiling_model_sources

# What it is told, for every compilation.
COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
exec {gxx} "$@"
"""


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept objects, which is empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor" / "exportkit"


@pytest.fixture
def compiler(tmp_path: Path, starts_process: None) -> Path:
    """A compiler that logs what it compiles in `log` beside it."""
    if (gxx := shutil.which("g++")) is None:
        pytest.skip("there is no g++")
    program = tmp_path / "logging-g++"
    program.write_text(COMPILER.format(log=tmp_path / "log", gxx=gxx))
    program.chmod(0o755)
    return program


def _compile(folder: Path, compiler: Path, text: str, **options: object) -> bytes:
    """Compiles the text as a model's kernels in a new folder, and returns the object file."""
    folder.mkdir()
    source = folder / "model.kernel.cpp"
    source.write_text(text)
    with compiling_model_sources(), config.patch({"cpp.cxx": (str(compiler),), "cpp.vec_isa_ok": True, **options}):
        build = cpp_builder.CppTorchDeviceOptions(device_type="cpu", compile_only=True)
        builder = cpp_builder.CppBuilder(
            name="model.kernel", sources=str(source), output_dir=str(folder), BuildOption=build
        )
        builder.build()
    return Path(builder.get_target_file_path()).read_bytes()


def _compilations(compiler: Path) -> int:
    return sum(" -c " in line for line in compiler.with_name("log").read_text().splitlines())


def test_the_same_source_is_compiled_once_to_the_same_bytes_in_any_folder(
    tmp_path: Path, objects: Path, compiler: Path
) -> None:
    text = 'const char* place() { return __FILE__; }\n#include "size.h"\nint size = SIZE;\n'
    size = tmp_path / "size.h"
    size.write_text("#define SIZE 3\n")
    text = text.replace("size.h", str(size))
    first = _compile(tmp_path / "1", compiler, text)
    assert _compile(tmp_path / "2", compiler, text) == first
    assert _compilations(compiler) == 1
    assert b"model.kernel.cpp" in first
    assert str(tmp_path / "1").encode() not in first
    size.write_text("#define SIZE 4\n")  # a header may change under the same source
    assert _compile(tmp_path / "3", compiler, text) != first
    assert _compilations(compiler) == 2
    assert _compile(tmp_path / "4", compiler, text, **{"aot_inductor.debug_compile": True})
    assert _compilations(compiler) == 3
    assert _compile(tmp_path / "5", compiler, text, force_disable_caches=True)
    assert _compilations(compiler) == 4
    shutil.rmtree(objects)
    assert _compile(tmp_path / "6", compiler, text)
    assert _compilations(compiler) == 5


def test_another_version_of_the_compiler_compiles_again(tmp_path: Path, objects: Path, compiler: Path) -> None:
    _compile(tmp_path / "1", compiler, "int one;")
    newer = f'case "$*" in --version) echo newer; exit ;; esac\n{compiler.read_text()}'
    compiler.write_text(f"#!/bin/sh\n{newer}")
    _compile(tmp_path / "2", compiler, "int one;")
    assert _compilations(compiler) == 2


@pytest.mark.parametrize("writable", ["objects", "the folder above"])
def test_objects_that_another_user_could_exchange_are_not_used(
    tmp_path: Path, objects: Path, compiler: Path, writable: str
) -> None:
    _compile(tmp_path / "1", compiler, "int one;")
    (objects if writable == "objects" else objects.parent).chmod(0o777)
    _compile(tmp_path / "2", compiler, "int one;")
    assert _compilations(compiler) == 2


def test_what_does_not_compile_is_not_kept(tmp_path: Path, objects: Path, compiler: Path) -> None:
    for folder in "12":
        with pytest.raises(exc.CppCompileError, match="nothing_like_that"):
            _compile(tmp_path / folder, compiler, "nothing_like_that")
    assert list(objects.iterdir()) == []


def test_the_oldest_objects_go(tmp_path: Path, objects: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_sources, "KEPT_OBJECTS", 2)
    _compile(tmp_path / "1", compiler, "int one;")
    (first,) = objects.iterdir()
    os.utime(first, (0, 0))
    _compile(tmp_path / "2", compiler, "int two;")
    _compile(tmp_path / "3", compiler, "int one;")  # used again, so `two` is the oldest
    os.utime(first, (9_999_999_999, 9_999_999_999))
    _compile(tmp_path / "4", compiler, "int three;")
    assert first in objects.iterdir()
    assert len(list(objects.iterdir())) == 2


@pytest.mark.parametrize(
    ("beginning", "rest", "apart"),
    [
        ("cpu.h", "int model;", True),
        ("cuda.h", "int model;", False),  # it includes what another interface was compiled with
        ("cpu.h", "void run() { AOTINoGradGuard guard; }", False),
        ("cpu.h", "AOTInductorModelContainerHandle handle;", False),
    ],
)
def test_the_interface_leaves_a_wrapper_that_does_not_need_it(
    tmp_path: Path, beginning: str, rest: str, apart: bool
) -> None:
    wrapper = tmp_path / "model.wrapper.cpp"
    whole = f"{lean_sources.interface_source().replace('cpu.h', beginning)}\n{rest}\n"
    wrapper.write_text(whole)
    assert lean_sources.cut_interface(wrapper) == apart
    text = wrapper.read_text()
    assert (text == whole) is not apart
    assert ("AOTIRuntimeError AOTInductorModelContainerRun(" in text) is not apart
    assert rest in text
    assert "#include <iostream>" in text


@pytest.mark.process
@pytest.mark.skipif(platform.machine() != "x86_64", reason="is about x86's vectors")
def test_code_without_wide_vectors_is_the_same_without_their_headers(tmp_path: Path) -> None:
    source = tmp_path / "code.cpp"
    source.write_text("#include <immintrin.h>\n__m256 twice(__m256 x) { return _mm256_add_ps(x, x); }\n")
    place = subprocess.run(["g++", "-print-file-name=include"], capture_output=True, text=True, check=True).stdout
    lean_sources.leave_out_wide_vectors(tmp_path / "include", Path(place.strip()))
    made = []
    for options in ([], ["-I", str(tmp_path / "include")]):
        command = ["g++", "-march=x86-64-v3", "-O2", *options, "-c", str(source), "-o"]
        subprocess.run([*command, str(tmp_path / "code.o")], check=True)
        made.append((tmp_path / "code.o").read_bytes())
        read = subprocess.run([*command, "-", "-E"], capture_output=True, text=True, check=True).stdout
        assert ("_mm512_add_ps" in read) is not bool(options)
    assert made[0] == made[1]


def test_torchs_header_parses_devices_without_regex_as_with(tmp_path: Path) -> None:
    """The original expression is the oracle."""
    lean_sources.write_header_without_regex(tmp_path)
    header = (tmp_path / lean_sources._DEVICE_HEADER).read_text()
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
        f"#include <cstdio>\n#include <string>\n{lean_sources._DEVICE_TEXT}\nint main() {{\n{lines}\n}}\n"
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
    header = tmp_path / "torch" / "include" / lean_sources._DEVICE_HEADER
    header.parent.mkdir(parents=True)
    header.write_text("#include <regex>\nnamespace torch::aot_inductor {\n std::regex re(other); }\n")
    monkeypatch.setattr(lean_sources.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    lean_sources.write_header_without_regex(tmp_path / "include")
    assert not (tmp_path / "include").exists()
