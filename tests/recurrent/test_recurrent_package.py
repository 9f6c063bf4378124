"""A package with recurrent layers carries their library, and two builds of that library go together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.errors import LibraryConflictError, ModelRunError
from exportkit.libraries import load_library
from exportkit.recurrent import LIBRARIES, NAMESPACE, fakes
from tests.artifacts import packaged
from tests.package import c_library
from tests.recurrent.recurrent_models import both, packed_inputs
from tests.recurrent.test_recurrent import answers
from tests.runtime import exportkit_run
from tests.subprocesses import run_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def other_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as another compiler would have made it: other bytes, the same operators."""
    path = tmp_path_factory.mktemp("other") / LIBRARIES["cpu"].name
    path.write_bytes(LIBRARIES["cpu"].read_bytes() + b"\0")
    return path


@pytest.fixture(scope="module")
def packages(other_build: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One artifact with each build."""
    folder = tmp_path_factory.mktemp("packages")
    made = (folder / "one.pt2", folder / "two.pt2")
    for package, library in zip(made, (LIBRARIES["cpu"], other_build)):
        manifest = packaged("recurrent", package, library)
        assert {operator.name.partition("::")[0] for operator in manifest.operators} == {NAMESPACE}
        assert [each.kernels for each in manifest.libraries] == [("any",)]
    return made


def test_a_package_has_eagers_bits_at_every_size(packages: tuple[Path, Path]) -> None:
    model, eager = exportkit.load(packages[0]), both().model
    for batch, length in ((1, 7), (1, 40), (9, 8), (30, 31)):
        x, lengths = packed_inputs(batch, length)
        for given in (lengths, lengths.flip(0), lengths.clamp(max=3)):
            found = answers(model, (x, given))
            assert all(torch.equal(a, b) for a, b in zip(found, answers(eager, (x, given)), strict=True))
    # torch 2.11's C interface drops what an operator says.
    with pytest.raises(ModelRunError, match=r"each length must be 1 to 7, got 9|message may be on stderr"):
        model(packed_inputs(3, 7)[0], torch.tensor([9, 2, 1]))
    assert model(*packed_inputs(3, 7))  # it goes on


@pytest.mark.cuda
def test_on_a_gpu_it_has_eagers_bits_and_weights_in_one_block(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "recurrent.pt2"
    packaged("recurrent-cuda", package, LIBRARIES["cpu"])
    model, eager = exportkit.load(package, "cuda"), both().model.to("cuda")
    for batch, length in ((1, 7), (9, 8), (30, 31)):
        given = [tensor.to("cuda") for tensor in packed_inputs(batch, length)]
        assert all(map(torch.equal, answers(model, given), answers(eager, given)))
    assert "contiguous chunk" not in capfd.readouterr().err  # torch's warning, for each call


def test_it_runs_without_python(packages: tuple[Path, Path]) -> None:
    assert exportkit_run.run(packages[0]).code == 0


@pytest.mark.parametrize("runtime", ["python", "cpp"])
def test_packages_with_two_builds_of_the_library_go_together(
    packages: tuple[Path, Path], tmp_path: Path, runtime: str
) -> None:
    if runtime == "cpp":
        exportkit_run.require_built()
    code = """
import sys, torch, exportkit
from exportkit.libraries import mapped_files
inputs = torch.zeros(2, 7, 6), torch.tensor([3, 7])
models = [exportkit.load(package) for package in sys.argv[1:]]
answers = [model(*inputs)[0][0] for model in models]
print(torch.equal(*answers), sum("recurrent" in path.name for path, _ in mapped_files()))
"""
    said = run_python(code, *packages, cwd=tmp_path, EXPORTKIT_RUNTIME=runtime, EXPORTKIT_CACHE=str(tmp_path / "cache"))
    assert said.strip() == "True 1", "one build serves for the other"


def test_a_library_with_other_operators_of_that_name_is_refused(tmp_path: Path) -> None:
    fakes.registered()
    stranger = c_library.operator_library(tmp_path, "lstm(Tensor x) -> Tensor", namespace=NAMESPACE)
    with pytest.raises(LibraryConflictError, match=f"`{NAMESPACE}` is already registered"):
        load_library(stranger)
