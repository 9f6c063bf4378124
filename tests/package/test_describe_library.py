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
from tests.fixtures import softpool_library
from tests.package.c_library import PRELUDE, build, operator_library

MINOR = ".".join(torch.__version__.split(".")[:2])
HAS_CUDA = torch.version.cuda is not None


ABORTS = "#include <stdlib.h>\n__attribute__((constructor)) static void start(void) { abort(); }"
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
    body = constructor('define("toy", "twice(Tensor x) -> Tensor"); kernel("toy", "CPU"); kernel("toy", "CUDA");')
    flags = ("-Wl,--no-as-needed", f"-L{tmp_path}", "-l:libcudart.so.99")
    library = describe_library(build(tmp_path, body + calls, *flags, name="_C.abi3.so"))
    assert (library.device, library.kernels) == ("cpu", ("cpu", "cuda"))
    assert [operator.name for operator in library.defines] == ["toy::twice"]
    assert "libcudart.so.99" in library.needs


def calling(symbol: str) -> str:
    """A library that defines an operator, and somewhere calls this function."""
    start = '__attribute__((constructor)) static void start(void) { define("toy", "twice(Tensor x) -> Tensor"); }'
    return PRELUDE + f"extern void {symbol}(void); void never(void) {{ {symbol}(); }} " + start


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
    more = PRELUDE + (
        '__attribute__((constructor)) static void start(void) { fragment("toy", "more(Tensor x) -> Tensor"); }'
    )
    build(tmp_path, more, "-Wl,-soname,libmm.so", *beside, "-lzz", name="libmm.so")
    first = constructor('define("toy", "twice(Tensor x) -> Tensor");')
    described = describe_with_needed(build(tmp_path, first, *beside, "-lmm", "-lzz", name="libaa.so"))
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
