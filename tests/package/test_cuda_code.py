"""Which GPUs code is for is read from the code, and a library without code for a target's GPU is refused."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exportkit.cli import main
from exportkit.errors import MissingLibraryError
from exportkit.inspect.rows import target_rows
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.cuda_code import DeviceCode, cuda_architectures, degree, device_code, strictest
from exportkit.package.manifest import Target
from exportkit.package.operators_gpus import operators_fits
from exportkit.runtime.targets import Host, NoTargetError, survey
from tests.package import samples, test_assemble
from tests.package.fat_binaries import MACHINE, PTX, fat_binary, ptx_rejection
from tests.package.test_assemble import artifact


def code(flags: int, *, abi: int = 8, marks: bytes = b"", machine: int = 190, system: int = 0x41) -> bytes:
    """The least of a code object: a header, and sections for the marks and for names."""
    names = b"\0.nv.compat\0.shstrtab\0"
    ident = b"\x7fELF\x02\x01\x01" + bytes([system, abi]) + bytes(7)
    sections = [
        struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, 64, len(marks), 0, 0, 1, 0),
        struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, 64 + len(marks), len(names), 0, 0, 1, 0),
    ]
    table = 64 + len(marks) + len(names)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, table, flags, 64, 56, 0, 64, 3, 2)
    return header + marks + names + b"".join(sections)


SPECIFIC, SIZED = bytes([2, 9, 1, 0]), bytes([4, 11, 4, 0]) + b"\x02\x09\x01\x00"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (code(0x6005A04), {"sm_90"}),
        (code(0x6005A04, marks=bytes([2, 9, 0, 0])), {"sm_90"}),
        (code(0x6005A04, marks=bytes([3, 7, 1, 1]) + SPECIFIC), {"sm_90a"}),
        (code(0x6006402, marks=SIZED), {"sm_100"}),  # what looks like the mark is inside of another
        (code(0x6007802, marks=SIZED + SPECIFIC), {"sm_120a"}),
        (code(0x6007802, marks=bytes([4, 11, 255, 255])), {"sm_120"}),
        (code(0x005A055A, abi=7, system=0x33), {"sm_90"}),
        (code(0x005A0D5A, abi=7, system=0x33), {"sm_90a"}),
        (code(0x6005A04, machine=62), set()),
        (code(0x6005A04)[:40], set()),
        (b"", set()),
        (b"no code", set()),
        (b"x" * 100 + code(0x6005004) + b"y" * 9 + code(0x6005A04, marks=SPECIFIC), {"sm_80", "sm_90a"}),
    ],
)
def test_code_says_which_architecture_it_is_for(tmp_path: Path, content: bytes, found: set[str]) -> None:
    file = tmp_path / "kernels.so"
    file.write_bytes(content)
    assert cuda_architectures([file]) == found


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc to make code with")
def test_what_nvcc_makes_is_known(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void kernel(float* x) { x[threadIdx.x] = 1; }\n")
    for name in ("sm_90a", "sm_100", "sm_120a"):
        made = tmp_path / f"{name}.cubin"
        subprocess.run(["nvcc", "-cubin", f"-arch={name}", source, "-o", made], check=True, capture_output=True)
        assert cuda_architectures([made]) == {name}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc to make code with")
def test_what_nvcc_packs_into_a_fat_binary_is_known(tmp_path: Path) -> None:
    source, made = tmp_path / "kernel.cu", tmp_path / "kernel.fatbin"
    source.write_text("__global__ void kernel(float* x) { x[threadIdx.x] = 1; }\n")
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    release = version.partition("release ")[2].partition(",")[0]  # its PTX is that of its CUDA
    codes = ["compute_80,code=[sm_80,compute_80]", "compute_90a,code=[sm_90a,compute_90a]", "compute_100f,code=sm_100f"]
    for packing in ([], ["-Xfatbin=-compress-all"]):
        flags = [*packing, *(f"-gencode=arch={code}" for code in codes)]
        subprocess.run(["nvcc", "-fatbin", *flags, source, "-o", made], check=True, capture_output=True)
        found = device_code(b"before" + made.read_bytes() + b"after")
        assert str(found) == "sm_80, sm_90a, sm_100f and PTX of sm_80, sm_90a"
        assert ptx_rejection(made.read_bytes(), release) == ""
        assert f"needs a driver for CUDA {release}" in ptx_rejection(made.read_bytes(), "11.0")
    for cut in range(0, made.stat().st_size, 7):
        device_code(made.read_bytes()[:cut])  # reads nothing beyond it


def test_a_target_is_as_strict_as_its_strictest_code() -> None:
    assert strictest([], "sm_90") == "sm_90"
    assert strictest(["sm_90"], "sm_90") == "sm_90"
    assert strictest(["sm_90", "sm_90a"], "sm_90") == "sm_90a"
    assert strictest(["sm_100f"], "sm_100") == "sm_100f"
    assert strictest(["sm_80"], "sm_90") == "sm_90"


def test_inspect_says_which_gpus_run_a_target() -> None:
    gpu = {"device": "cuda", "built_with_cuda": "13.0", "cpu_isa": None}
    for architecture, ptx, said in (
        ("sm_90a", False, "CUDA sm_90a and no other GPU"),
        ("sm_100f", False, "CUDA sm_100f and later sm_10x"),
        ("sm_80", False, "CUDA sm_80 and later sm_8x"),
        ("sm_80", True, "CUDA sm_80 and later sm_8x, newer ones by PTX"),
    ):
        target = samples.target(cuda_architecture=architecture, cuda_ptx=ptx, **gpu)
        ((_, text),) = target_rows(msgspec.structs.replace(samples.manifest(), targets=(target,)))
        assert text.startswith(said + ", ")


# --- libraries of operators -------------------------------------------------------------------------------------------


def gpu(architecture: str = "sm_80", **changes: Any) -> Target:
    changes = {"name": "gpu", "cpu_isa": None, "built_with_cuda": "13.0", **changes}
    return samples.target(device="cuda", cuda_architecture=architecture, **changes)


def library(folder: Path, name: str, code: bytes = b"", mention: bytes = b"toy\0", **changes: Any) -> Any:
    """A library with kernels for CUDA, unless the changes say else, and with such code."""
    cuda = {"device": "cuda", "kernels": ("cuda",), "defines": (), "needs": ()}
    return test_assemble.library(folder, name, b"\x7fELF" + mention + code, **{**cuda, **changes})


def defining(folder: Path) -> Any:
    return library(folder, "libtoy_cpu.so", device="cpu", kernels=("cpu",), defines=samples.manifest().operators)


def packaged(folder: Path, *libraries: Any, target: Target | None = None) -> Path:
    source = artifact(folder / "gpu_aoti.pt2", target=target or gpu())
    assemble([source], [defining(folder), *libraries], folder / "toy.pt2")
    return folder / "toy.pt2"


def test_code_for_another_gpu_alone_is_refused_with_what_it_has_and_how_to_build_it(tmp_path: Path) -> None:
    code = fat_binary((MACHINE, 90), (MACHINE, 90, "a"), (PTX, 90))
    with pytest.raises(MissingLibraryError) as caught:
        packaged(tmp_path, library(tmp_path, "libtoy_cuda.so", code))
    said = caught.value
    assert said.message == (
        "target gpu is for sm_80, but the operators toy::* have code for sm_90, sm_90a and PTX of sm_90 "
        "(libtoy_cuda.so), which that GPU does not run"
    )
    assert 'TORCH_CUDA_ARCH_LIST="8.0;9.0;9.0a"' in str(said.hint)
    assert "-gencode=arch=compute_80,code=sm_80" in str(said.hint)
    assert not (tmp_path / "toy.pt2").exists()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (fat_binary((MACHINE, 80)), "native"),
        (b"other data" + fat_binary((MACHINE, 90)) + fat_binary((MACHINE, 75), (MACHINE, 80)), "native"),
        (fat_binary((MACHINE, 90), (PTX, 75)), "ptx"),
        (b"", None),
        (b"\x50\xed\x55\xba\x01\x00\x10", None),
    ],
)
def test_code_that_runs_there_and_libraries_without_code_are_taken(
    tmp_path: Path, code: bytes, found: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    made = packaged(tmp_path, library(tmp_path, "libtoy_cuda.so", code))
    with PackageReader(made) as reader:
        fits = [fit.degree for fit in operators_fits(reader.manifest, reader.read)]
    assert fits == ([found] if found else [])
    assert main(["inspect", str(made)]) == 0
    said = "have code for sm_90 and PTX of sm_75: the driver compiles their PTX for this GPU at the first call"
    assert (said in capsys.readouterr().out) == (found == "ptx")


def test_the_libraries_of_a_namespace_and_those_that_they_need_count_together(tmp_path: Path) -> None:
    newer = library(tmp_path, "libtoy_new.so", fat_binary((MACHINE, 90)))
    older = library(tmp_path, "libtoy_old.so", fat_binary((MACHINE, 80)))
    packaged(tmp_path, newer, older)
    needing = library(tmp_path, "libtoy_new.so", fat_binary((MACHINE, 90)), needs=("libkernels.so",))
    needed = library(tmp_path, "libkernels.so", fat_binary((MACHINE, 80)), b"", kernels=())
    packaged(tmp_path, needing, needed)
    with pytest.raises(MissingLibraryError, match="sm_80"):
        packaged(tmp_path, newer, needed)


def test_targets_of_the_cpu_are_not_concerned_and_each_gpu_is_compared(tmp_path: Path) -> None:
    both = [defining(tmp_path), library(tmp_path, "libtoy_cuda.so", fat_binary((MACHINE, 90, "a")))]
    sources = [artifact(tmp_path / "cpu.pt2"), artifact(tmp_path / "new.pt2", target=gpu("sm_90"))]
    assemble(sources, both, tmp_path / "toy.pt2")
    older = artifact(tmp_path / "old.pt2", target=gpu("sm_80", name="old"))
    with pytest.raises(MissingLibraryError, match="target old is for sm_80"):
        assemble([*sources, older], both, tmp_path / "toy.pt2")


@pytest.mark.parametrize("code", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_103a", "sm_120"])
@pytest.mark.parametrize("has_ptx", [False, True])
def test_a_library_is_held_to_the_rule_of_a_target(code: str, has_ptx: bool) -> None:
    """The loader's rule, in C++, for targets that have the code."""
    for here in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)):
        host = Host("linux-x86_64", "x86-64-v4", "2.13.0+cu130", "13.0", (here,))
        target = gpu(code, cuda_ptx=has_ptx)
        try:
            expected: str = survey([target], "cuda", host).fitting[0].fit
        except NoTargetError:
            expected = "no"
        ptx = frozenset({code}) if has_ptx and not code.endswith("a") else frozenset[str]()
        assert degree(DeviceCode(frozenset({code}), ptx), f"sm_{here[0]}{here[1]}") == expected


def test_code_of_a_family_runs_on_its_later_gpus() -> None:
    family = DeviceCode(frozenset({"sm_100f"}), frozenset({"sm_120f"}))
    found = {name: degree(family, name) for name in ("sm_100", "sm_103", "sm_110", "sm_120", "sm_121")}
    assert found == {"sm_100": "native", "sm_103": "native", "sm_110": "no", "sm_120": "ptx", "sm_121": "ptx"}
