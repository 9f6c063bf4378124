"""Which GPUs machine code is for is read from the code: from objects of nvcc, and from some that are made by hand."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import msgspec
import pytest

from exportkit.inspect.rows import target_rows
from exportkit.package.cuda_code import cuda_architectures, device_code, strictest
from tests.package import samples


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
    codes = ["compute_80,code=[sm_80,compute_80]", "compute_90a,code=[sm_90a,compute_90a]", "compute_100f,code=sm_100f"]
    for packing in ([], ["-Xfatbin=-compress-all"]):
        flags = [*packing, *(f"-gencode=arch={code}" for code in codes)]
        subprocess.run(["nvcc", "-fatbin", *flags, source, "-o", made], check=True, capture_output=True)
        found = device_code(b"before" + made.read_bytes() + b"after")
        assert str(found) == "sm_80, sm_90a, sm_100f and PTX of sm_80, sm_90a"
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
