from __future__ import annotations

from pathlib import Path

import pytest

from exportkit.errors import NotAnOperatorLibraryError
from exportkit.package.elf import is_stable, oldest_torch, read_elf
from tests.package.c_library import PRELUDE, build

TORCHS = [
    "_ZN3c105ErrorC1E",  # a function of c10
    "_ZNK2at10TensorBase4sizeEl",  # a method of at
    "_ZTVN5torch3jit8OperatorE",  # a vtable of torch
    "_ZNSt6vectorIN3c106IValueESaIS1_EE9push_backEOS1_",  # a vector of c10's values
    "_ZN5torch7Library4_defE",  # TORCH_LIBRARY
    "_ZN3c104cuda20getCurrentCUDAStreamEa",  # a function of c10::cuda
]
OTHERS = ["_ZNSt6vectorIiSaIiEE9push_backEOi", "_Z12at3c10torchv", "_ZN6mytorch1fEv", "_ZN13c10_lookalike1fEv", "sqrt"]


@pytest.mark.parametrize("symbol", [*TORCHS, *OTHERS])
def test_cpp_names_of_torch_are_not_stable_and_others_are(symbol: str) -> None:
    assert is_stable(["aoti_torch_empty_strided", symbol]) == (symbol in OTHERS)
    assert symbol in OTHERS or oldest_torch([symbol]) is None


def test_names_versions_and_needs_are_read(tmp_path: Path) -> None:
    build(tmp_path, "int other(void) { return 1; }", "-Wl,-soname,libother.so.3", name="libother.so")
    source = PRELUDE + "extern int other(void); void f(void) { define(0, 0); other(); }"
    flags = ("-Wl,-soname,libmine.so", "-Wl,-rpath,$ORIGIN:/opt/x", "-Wl,--no-as-needed", f"-L{tmp_path}")
    elf = read_elf(build(tmp_path, source, *flags, "-lother", "-lm"))
    assert elf.needed == ("libother.so.3", "libm.so.6", "libtorch_cpu.so", "libc.so.6")
    assert (elf.soname, elf.search_path, elf.uncommon) == ("libmine.so", ("$ORIGIN", "/opt/x"), ("libother.so.3",))
    assert elf.torch_symbols == {"aoti_torch_library_init_def", "aoti_torch_library_def"}
    assert "other" in elf.undefined
    assert elf.host_needs == (f"GLIBC_{elf.glibc}", "libother.so.3")
    assert elf.glibcxx is None


@pytest.mark.parametrize(
    ("symbol", "needed"),
    [
        ("aoti_torch_device_type_cuda", False),  # a constant that every library with a Device has
        ("torch_tag_cudagraph_unsafe", False),  # a constant that every library with a tag has
        ("aoti_torch_get_current_cuda_stream", True),
        ("torch_c10_cuda_check_msg", True),
        ("cudaLaunchKernel", True),
        ("cuInit", True),
        ("customary", False),
    ],
)
def test_what_a_library_calls_says_whether_it_needs_a_torch_with_cuda(
    tmp_path: Path, symbol: str, needed: bool
) -> None:
    call = f"extern int {symbol}(void); int f(void) {{ return {symbol}(); }}"
    elf = read_elf(build(tmp_path, call))
    assert elf.needs_torch_cuda == needed
    assert ("libtorch_cuda.so" in elf.host_needs) == needed
    weak = f"extern int __attribute__((weak)) {symbol}(void); int f(void) {{ return {symbol} ? {symbol}() : 0; }}"
    assert not read_elf(build(tmp_path, weak)).needs_torch_cuda  # as one file for both devices has it


@pytest.mark.parametrize(
    ("name", "needed", "symbol"),
    [("cudart.so.13", False, "cudaLaunchKernel"), ("torch_cuda.so", True, "f"), ("c10_cuda.so", True, "f")],
)
def test_cudas_libraries_are_needed_of_the_host(tmp_path: Path, name: str, needed: bool, symbol: str) -> None:
    build(tmp_path, f"void {symbol}(void) {{}}", f"-Wl,-soname,lib{name}", name="libgiven.so")
    calls = f"extern void {symbol}(void); void g(void) {{ {symbol}(); }}"
    flags = ("-Wl,-rpath,$ORIGIN", f"-L{tmp_path}", "-Wl,--no-as-needed", "-lgiven")
    elf = read_elf(build(tmp_path, calls, *flags))
    assert elf.needs_torch_cuda == needed
    assert [need for need in elf.host_needs if need.startswith("lib")] == [f"lib{name}"]
    assert elf.uncommon == ()


def test_a_copy_of_libstdcxx_inside_is_found(tmp_path: Path) -> None:
    source = '#include <stdexcept>\nvoid f(int x) { if (x) throw std::runtime_error("x"); }'
    shared = read_elf(build(tmp_path, source, compiler="g++"))
    static = read_elf(build(tmp_path, source, "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-s", compiler="g++"))
    assert (shared.static_libstdcxx, static.static_libstdcxx) == (False, True)
    assert shared.glibcxx is not None
    assert not read_elf(build(tmp_path, "int f(void) { return 1; }")).static_libstdcxx


@pytest.mark.parametrize("content", [b"", b"not ELF", b"\x7fELF", b"\x7fELF\x02\x01\x01" + bytes(57), b"\x7fELF" * 100])
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "libodd.so"
    path.write_bytes(content)
    with pytest.raises(NotAnOperatorLibraryError, match=r"libodd\.so is "):
        read_elf(path)


def test_a_library_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path, PRELUDE + "void f(void) { define(0, 0); }")
    whole = path.read_bytes()
    for kept in range(16, len(whole), len(whole) // 24):
        path.write_bytes(whole[:kept])
        with pytest.raises(NotAnOperatorLibraryError, match=r"libtoy_cpu\.so"):
            read_elf(path)


@pytest.mark.parametrize("offset", [0x10000, 2**63 - 1, 2**63, 2**64 - 64])
def test_a_library_whose_section_table_lies_elsewhere_is_refused(tmp_path: Path, offset: int) -> None:
    library = build(tmp_path, "int x;")
    damaged = bytearray(library.read_bytes())
    damaged[40:48] = offset.to_bytes(8, "little")
    library.write_bytes(damaged)
    with pytest.raises(NotAnOperatorLibraryError):
        read_elf(library)
