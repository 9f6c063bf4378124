"""Operator libraries: what is read from their files, and what is said of them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exportkit.errors import ExportkitError, LibraryLoadError, NotAnOperatorLibraryError
from exportkit.libraries import host_platform
from exportkit.package.describe_library import describe_library, describe_with_needed
from exportkit.package.elf import is_stable, oldest_torch, read_elf
from tests.fixtures import softpool_library
from tests.package.c_library import PRELUDE, build, operator_library

MINOR = ".".join(torch.__version__.split(".")[:2])
HAS_CUDA = torch.version.cuda is not None


ABORTS = "#include <stdlib.h>\n__attribute__((constructor)) static void start(void) { abort(); }"
DEFINES = 'define("toy", "twice(Tensor x) -> Tensor");'
CALLS_CUDA = "extern void torch_c10_cuda_check_msg(void); void f(void) { torch_c10_cuda_check_msg(); }"


def constructor(body: str) -> str:
    """A library that could register operators, and does this when it is loaded."""
    start = f"__attribute__((constructor)) static void start(void) {{ {body} }}"
    return PRELUDE + "void later(void) { define(0, 0); }" + start


def test_a_stable_library_is_described(tmp_path: Path) -> None:
    path = operator_library(tmp_path, "twice(Tensor x, int n=2) -> Tensor")
    library = describe_library(path)
    assert library.record == f"exportkit/ops/{host_platform()}/libtoy_cpu.so"
    assert library.platform == host_platform()
    assert library.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert library.device == "cpu"
    assert [(op.name, op.schema) for op in library.defines] == [
        ("toy::twice", "toy::twice(Tensor x, int n=2) -> Tensor")
    ]
    assert library.kernels == ()
    assert (library.needs_torch, library.torch_bound) == ("2.11", None)


def test_a_library_with_torchs_cpp_is_bound_to_this_torch() -> None:
    library = describe_library(softpool_library.build())
    assert (library.needs_torch, library.torch_bound) == (MINOR, MINOR)
    assert library.defines
    assert library.kernels


@pytest.mark.skipif(HAS_CUDA, reason="torch has CUDA here: the library is loaded")
def test_a_cuda_library_is_described_without_loading_it_where_torch_has_no_cuda(tmp_path: Path) -> None:
    adds = '__attribute__((constructor)) static void start(void) { kernel("toy", "CUDA"); abort(); }'
    library = describe_library(build(tmp_path, PRELUDE + adds + CALLS_CUDA))
    assert (library.device, library.kernels, library.defines) == ("cuda", ("cuda",), ())
    assert library.needs_torch == "2.11"
    assert "libtorch_cuda.so" in library.needs


@pytest.mark.skipif(HAS_CUDA, reason="torch has CUDA here: the library is loaded")
def test_where_torch_has_no_cuda_a_library_of_operators_that_needs_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LibraryLoadError, match=r"which operators it defines: libtoy_cpu\.so needs a torch with CUDA"):
        describe_library(build(tmp_path, constructor("abort();") + CALLS_CUDA))


@pytest.mark.slow
def test_one_library_with_kernels_for_cpu_and_cuda_is_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's CUDAExtension builds it. The CUDA runtime is one that the test makes."""
    build(tmp_path, "void cudaLaunchKernel(void) {}", "-Wl,-soname,libcudart.so.99", name="libcudart.so.99")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    calls = "extern void cudaLaunchKernel(void); void never(void) { cudaLaunchKernel(); }"
    body = constructor(DEFINES + 'kernel("toy", "CPU"); kernel("toy", "CUDA");')
    flags = ("-Wl,--no-as-needed", f"-L{tmp_path}", "-l:libcudart.so.99")
    library = describe_library(build(tmp_path, body + calls, *flags, name="_C.abi3.so"))
    assert (library.device, library.kernels) == ("cpu", ("cpu", "cuda"))
    assert [operator.name for operator in library.defines] == ["toy::twice"]
    assert "libcudart.so.99" in library.needs


def calling(symbol: str) -> str:
    """A library that defines an operator, and somewhere calls this function."""
    return constructor(DEFINES) + f"extern void {symbol}(void); void never(void) {{ {symbol}(); }}"


@pytest.mark.slow
@pytest.mark.skipif(MINOR == "2.11", reason="torch 2.11 has no newer shims")
def test_a_shim_newer_than_2_11_asks_for_the_torch_that_is_here(tmp_path: Path) -> None:
    library = describe_library(build(tmp_path, calling("aoti_torch_cpu_rand_like")))
    assert (library.needs_torch, library.torch_bound) == (MINOR, None)


REFUSED = [
    (calling("torch_of_the_future"), LibraryLoadError, "symbol: torch_of_the_future", "built for another torch"),
    (calling("elsewhere"), LibraryLoadError, "undefined symbol: elsewhere", "defines elsewhere"),
    (constructor("abort();"), LibraryLoadError, r"libtoy_cpu\.so .*SIGABRT", ""),
    (constructor("exit(3);"), LibraryLoadError, r"libtoy_cpu\.so .*exited with status 3", ""),
    (constructor('define("toy", "not a schema");'), LibraryLoadError, r"libtoy_cpu\.so .*SIG", ""),
    (constructor(""), NotAnOperatorLibraryError, "defines no operator and adds no kernel", ""),
    # One without registrations is not loaded at all.
    (ABORTS, NotAnOperatorLibraryError, "registers no operators", ""),
]


@pytest.mark.slow_but("symbol*", "undefined*", "registers*", "*SIGABRT")
@pytest.mark.parametrize(("source", "error", "said", "hint"), REFUSED, ids=[said for *_, said, _ in REFUSED])
def test_a_library_that_cannot_be_described_is_named_and_ends_no_process_of_ours(
    tmp_path: Path, source: str, error: type[ExportkitError], said: str, hint: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        describe_library(build(tmp_path, source))
    assert hint in (caught.value.hint or "")


def test_a_library_brings_those_that_its_runpath_finds_in_loading_order(tmp_path: Path) -> None:
    """The last of three needs both others; the second defines an operator of the same namespace."""
    beside = ("-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", f"-L{tmp_path}")
    build(tmp_path, "int helper(void) { return 1; }", "-Wl,-soname,libzz.so", name="libzz.so")
    more = constructor('fragment("toy", "more(Tensor x) -> Tensor");')
    build(tmp_path, more, "-Wl,-soname,libmm.so", *beside, "-lzz", name="libmm.so")
    described = describe_with_needed(build(tmp_path, constructor(DEFINES), *beside, "-lmm", "-lzz", name="libaa.so"))
    assert [path.name for path, _ in described] == ["libzz.so", "libmm.so", "libaa.so"]
    assert [[operator.name for operator in library.defines] for _, library in described] == [
        [], ["toy::more"], ["toy::twice"]
    ]  # fmt: skip
    assert [library.device for _, library in described] == ["cpu"] * 3
    assert describe_library(tmp_path / "libaa.so") == described[-1][1]


def test_a_library_beside_it_without_its_own_name_cannot_come_along(tmp_path: Path) -> None:
    build(tmp_path, "int other(void) { return 1; }", name="libother.so")
    flags = ("-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", f"-L{tmp_path}", "-lother")
    with pytest.raises(LibraryLoadError, match=r"needs .*libother\.so, which .*: its soname is missing") as caught:
        describe_library(build(tmp_path, constructor(""), *flags))
    assert "-Wl,-soname,libother.so" in (caught.value.hint or "")


def test_a_python_module_is_refused_with_the_name_of_the_library_beside_it(tmp_path: Path) -> None:
    build(tmp_path, constructor(""), "-Wl,-soname,libops.so", name="libops.so")
    flags = ("-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", f"-L{tmp_path}", "-lops")
    with pytest.raises(NotAnOperatorLibraryError, match="registers no operators") as caught:
        describe_library(build(tmp_path, "int module(void) { return 1; }", *flags, name="_C.so"))
    assert "libops.so" in (caught.value.hint or "")


def test_a_library_that_wants_another_library(tmp_path: Path) -> None:
    build(tmp_path, "int other(void) { return 1; }", "-Wl,-soname,libother.so.3", name="libother.so")
    flags = ("-Wl,--no-as-needed", f"-L{tmp_path}", "-lother")
    with pytest.raises(LibraryLoadError, match=r"libother\.so\.3: cannot open") as caught:
        describe_library(build(tmp_path, constructor(""), *flags))
    assert "libother.so.3" in (caught.value.hint or "")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotAnOperatorLibraryError, match=r"cannot read .*libmissing\.so: No such file"):
        describe_library(tmp_path / "libmissing.so")


def test_neither_describing_nor_any_module_of_the_package_imports_torch(tmp_path: Path) -> None:
    path = operator_library(tmp_path, "twice(Tensor x) -> Tensor")
    modules = [file.stem for file in Path("exportkit/package").glob("*.py") if file.stem != "__init__"]
    assert "assemble" in modules
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module('exportkit.package.' + name)\n"
        "from pathlib import Path\n"
        "from exportkit.package.describe_library import describe_library\n"
        "assert describe_library(Path(sys.argv[1])).defines\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)


# --- the files themselves ---------------------------------------------------------------------------------------------

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


def elsewhere(library: bytes, offset: int) -> bytes:
    """The library with its table of sections there."""
    return library[:40] + offset.to_bytes(8, "little") + library[48:]


def test_what_is_no_whole_library_is_refused_by_name(tmp_path: Path) -> None:
    path = build(tmp_path, PRELUDE + "void f(void) { define(0, 0); }")
    whole = path.read_bytes()
    others = [b"", b"not ELF", b"\x7fELF", b"\x7fELF\x02\x01\x01" + bytes(57), b"\x7fELF" * 100]
    cut = [whole[:kept] for kept in range(16, len(whole), len(whole) // 24)]
    damaged = [elsewhere(whole, offset) for offset in (0x10000, 2**63 - 1, 2**63, 2**64 - 64)]
    for content in (*others, *cut, *damaged):
        path.write_bytes(content)
        with pytest.raises(NotAnOperatorLibraryError, match=r"libtoy_cpu\.so"):
            read_elf(path)
