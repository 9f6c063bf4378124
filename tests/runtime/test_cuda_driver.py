"""The driver's CUDA version is compared before code is loaded; a injected libcuda or a given version stands for it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from exportkit.errors import NoTargetError
from exportkit.package.archive import PackageReader, write_package
from exportkit.runtime.targets import Host, driver_cuda, pick, survey_package
from tests.package import c_library, samples
from tests.package.fat_binaries import MACHINE, PTX, fat_binary, ptx_rejection
from tests.runtime import tiny
from tests.subprocesses import run_interpreter

HOPPER = Host("linux-x86_64", "x86-64-v4", "2.15.0+cu132", "13.2", ((9, 0),), driver="13.2")


def with_ptx(version: tuple[int, int]) -> bytes:
    """A fat binary with the machine code of one GPU, and PTX of this version."""
    return fat_binary((MACHINE, 80), (PTX, 80), version=version)


@pytest.mark.parametrize(
    ("ptx", "driver", "needed"),
    [
        ((9, 0), "13.0", None),
        ((8, 8), "13.0", None),
        ((8, 8), "12.9", None),
        ((8, 4), "12.4", None),
        ((8, 5), "12.5", None),
        ((9, 0), "12.9", "13.0"),
        ((9, 2), "13.0", "13.2"),
        ((8, 8), "12.8", "12.9"),
        ((8, 6), "12.6", "12.7"),
        ((7, 8), "11.7", "11.8"),
    ],
)
def test_a_driver_compiles_the_ptx_of_its_own_cuda_and_older_ones(ptx, driver, needed):
    said = ptx_rejection(b"before" + with_ptx((7, 0)) + with_ptx(ptx) + b"after", driver)
    if needed is None:
        assert said == ""
    else:
        assert f"its PTX {ptx[0]}.{ptx[1]} needs a driver for CUDA {needed}; this one supports" in said
        assert said.endswith(f"this one supports CUDA {driver}")


def test_code_that_is_no_fat_binary_or_a_damaged_one_has_no_ptx():
    whole = with_ptx((9, 9))
    damaged = (whole[:20], whole[:16] + b"\xff" * 64, whole[:4] + whole[5:])
    for code in (b"", b"\x7fELF" * 9, b"\x50\xed\x55\xba", *damaged):
        assert ptx_rejection(code, "12.0") == ""
    for cut in range(len(whole)):
        ptx_rejection(whole[:cut], "12.0")  # reads nothing beyond it


def package(folder: Path, code: bytes) -> PackageReader:
    """A package whose CUDA target has this code, beside one for the CPU."""
    cuda = samples.target(name="gpu", device="cuda", cpu_isa=None, cuda_architecture="sm_80", cuda_ptx=True)
    targets = (msgspec.structs.replace(cuda, built_with_cuda="13.2"), samples.target(cpu_isa=None))
    records = {
        **{f"data/aotinductor/{each.name}/model.wrapper.so": code for each in targets},
        samples.WEIGHT: samples.RECORDS[samples.WEIGHT],
        samples.CASE: samples.RECORDS[samples.CASE],
    }
    write_package(folder / "x.pt2", samples.manifest(libraries=(), targets=targets), records)
    return PackageReader(folder / "x.pt2")


def test_a_target_whose_ptx_the_driver_cannot_compile_is_left_for_another(tmp_path: Path) -> None:
    with package(tmp_path, with_ptx((9, 2))) as reader:
        targets = reader.manifest.targets
        assert survey_package(reader, targets, "auto", HOPPER).fitting[0].fit == "ptx"
        old = HOPPER._replace(driver="13.0")
        found = survey_package(reader, targets, "auto", old)
        assert [choice.device for choice in found.fitting] == ["cpu"]
        assert "its PTX 9.2 needs a driver for CUDA" in found.rejected["gpu"]
        with pytest.raises(NoTargetError, match=r"gpu: it has no machine code for this GPU(?s:.*)newer driver"):
            survey_package(reader, targets, "cuda", old)
        ampere = old._replace(capabilities=((8, 6),))
        assert survey_package(reader, targets, "cuda", ampere).fitting[0].fit == "native"


def test_minor_versions_of_cuda_may_differ_where_there_is_machine_code():
    target = tiny.target(device="cuda", cuda_architecture="sm_90a", built_with_cuda="13.2", cpu_isa=None)
    for driver in ("13.0", "13.2", "14.0"):
        assert pick([target], "cuda", HOPPER._replace(driver=driver)).fit == "native"


def test_a_driver_older_than_torchs_cuda_is_the_reason_that_there_is_no_device():
    target = tiny.target(device="cuda", cuda_architecture="sm_90", built_with_cuda="13.0", cpu_isa=None)
    here = Host("linux-x86_64", "x86-64-v4", "2.14.1+cu130", "13.0", driver="12.4")
    with pytest.raises(NoTargetError, match=r"the driver supports CUDA 12\.4, and this torch has CUDA 13\.0: "):
        pick([target], "cuda", here)
    with pytest.raises(NoTargetError, match="torch sees none"):
        pick([target], "cuda", here._replace(driver=None))


INJECTED = "int cuDriverGetVersion(int* version) { *version = 12040; return 0; }\n"


def test_the_driver_is_asked_without_torch_or_a_device(tmp_path: Path) -> None:
    c_library.build(tmp_path, INJECTED, name="libcuda.so.1")
    asked = "from exportkit.runtime.targets import driver_cuda; print(driver_cuda())"
    assert run_interpreter(asked, cwd=tmp_path, LD_LIBRARY_PATH=str(tmp_path)).strip() == "12.4"
    if not os.path.exists("/dev/nvidiactl"):
        assert driver_cuda() is None
