"""One package from several machines: each compiles for its GPU, and one merges what they made (docs/production.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from exportkit.errors import MergeError
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.manifest import Library, Source, Target
from exportkit.runtime.targets import Host, survey
from tests.package import samples
from tests.package.test_assemble import artifact, library


def gpu(architecture: str, torch: str, cuda: str, **changes: Any) -> Target:
    """A target that was compiled there."""
    made = {"cuda_architecture": architecture, "built_with_torch": torch, "built_with_cuda": cuda, **changes}
    return samples.target(name=f"cuda_{architecture[:5]}", device="cuda", cpu_isa=None, **made)


A100 = gpu("sm_80", "2.13.0+cu130", "13.0", cuda_ptx=True)
L4 = gpu("sm_89", "2.12.1+cu128", "12.8")
H100 = gpu("sm_90a", "2.15.0+cu132", "13.2", needs_torch="2.14")
MACHINES = {"cpu": samples.target(), "a100": A100, "l4": L4, "h100": H100}


def made(folder: Path, **changes: dict[str, Any]) -> list[Path]:
    """What each machine made, with what differs there."""
    return [
        artifact(folder / f"{name}.pt2", target=target, **changes.get(name, {})) for name, target in MACHINES.items()
    ]


def operators(folder: Path) -> list[tuple[Path, Library]]:
    """The operators, built once for all machines: the CUDA library has the code of every GPU in it."""
    cuda = library(folder, "libtoy_cuda.so", b"toy\0sm_80 sm_89 sm_90a", device="cuda", kernels=("cuda",), defines=())
    return [library(folder), cuda]


def test_each_machine_runs_what_was_made_for_it(tmp_path: Path) -> None:
    manifest = assemble(made(tmp_path), operators(tmp_path), tmp_path / "model.pt2")
    assert [target.name for target in manifest.targets] == ["cpu_v3", "cuda_sm_80", "cuda_sm_89", "cuda_sm_90"]
    with PackageReader(tmp_path / "model.pt2") as reader:
        reader.verify()

    def best(torch: str, cuda: str | None, *capabilities: tuple[int, int]) -> tuple[str, str]:
        host = Host("linux-x86_64", "x86-64-v4", torch, cuda, capabilities)
        choice = survey(manifest.targets, "auto", host).fitting[0]
        return choice.target.name, choice.fit

    assert best("2.15.0+cu132", "13.2", (9, 0)) == ("cuda_sm_90", "native")
    assert best("2.13.0+cu130", "13.0", (9, 0)) == ("cuda_sm_80", "ptx")  # needs a newer torch
    assert best("2.14.1+cu130", "13.0", (8, 9)) == ("cuda_sm_80", "native")  # made with another CUDA
    assert best("2.14.1+cu128", "12.8", (8, 9)) == ("cuda_sm_89", "native")
    assert best("2.14.1+cu130", "13.0", (10, 0)) == ("cuda_sm_80", "ptx")
    assert best("2.14.1+cpu", None) == ("cpu_v3", "native")


def test_the_order_of_merging_does_not_matter_but_for_whose_cases_are_kept(tmp_path: Path) -> None:
    parts = made(tmp_path, h100={"case": b"eager on the H100"})
    at_once = assemble(parts, operators(tmp_path), tmp_path / "once.pt2")
    assemble(parts[:2], operators(tmp_path), tmp_path / "half.pt2")
    in_steps = assemble([tmp_path / "half.pt2", *parts[2:]], [], tmp_path / "steps.pt2")
    assert in_steps == at_once
    last = assemble(parts[::-1], operators(tmp_path), tmp_path / "last.pt2")
    assert {target.name for target in last.targets} == {target.name for target in at_once.targets}
    with PackageReader(tmp_path / "last.pt2") as reader:
        assert reader.read(samples.CASE) == b"eager on the H100"


def test_machines_that_built_the_operators_each_for_itself_are_refused(tmp_path: Path) -> None:
    own = library(tmp_path / "h100", "libtoy_cuda.so", b"toy\0sm_90a", device="cuda", kernels=("cuda",), defines=())
    with pytest.raises(MergeError, match=r"two libraries have the name .*libtoy_cuda\.so(?s:.*)TORCH_CUDA_ARCH_LIST"):
        assemble(made(tmp_path), [*operators(tmp_path), own], tmp_path / "model.pt2")
    assemble(made(tmp_path)[:2], operators(tmp_path), tmp_path / "shared.pt2")
    assemble(made(tmp_path)[3:], [library(tmp_path), own], tmp_path / "own.pt2")
    with pytest.raises(MergeError, match=r"different records with the name .*libtoy_cuda\.so"):
        assemble([tmp_path / "shared.pt2", tmp_path / "own.pt2"], [], tmp_path / "model.pt2")


def test_machines_that_had_other_weights_or_compiled_one_target_twice_are_refused(tmp_path: Path) -> None:
    source = msgspec.structs.replace(samples.manifest().source, state_sha256="1" * 64)
    assert isinstance(source, Source)
    with pytest.raises(MergeError, match=r"cpu\.pt2 and h100\.pt2 were exported with different weights: sha256"):
        assemble(made(tmp_path, h100={"source": source}), operators(tmp_path), tmp_path / "model.pt2")
    twin = artifact(tmp_path / "twin.pt2", target=msgspec.structs.replace(A100, built_with_torch="2.14.1+cu130"))
    with pytest.raises(MergeError, match="different targets with the name cuda_sm_80"):
        assemble([*made(tmp_path), twin], operators(tmp_path), tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()
