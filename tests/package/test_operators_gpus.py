"""An operator library without code for a target's GPU is refused where the package is put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exportkit.cli import main
from exportkit.errors import MissingLibraryError
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.cuda_code import DeviceCode, degree
from exportkit.package.manifest import Target
from exportkit.package.operators_gpus import operators_fits
from exportkit.runtime.targets import Host, NoTargetError, survey
from tests.package import samples, test_assemble
from tests.package.fat_binaries import MACHINE, PTX, fat_binary
from tests.package.test_assemble import artifact


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
