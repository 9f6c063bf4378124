"""What `exportkit ops new` writes compiles, keeps the contract, exports, and reads as if somebody had written it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from exportkit.cli import main
from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.operator_trial import Subject
from tests.artifacts import ROOT
from tests.operators.scaffold import scaffolded
from tests.operators.scaffold.scaffolded import OPERATORS, PACKAGE, check_needs, compiled_for_cuda, imported
from tests.subprocesses import output_of

pytestmark = pytest.mark.slow

BESIDE_PYTHON = Path(sys.executable).parent


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package with an operator of each kind, compiled once."""
    return scaffolded.built_package(tmp_path_factory.mktemp("package"))


@pytest.fixture
def on_path(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, which can be imported."""
    monkeypatch.syspath_prepend(str(package))
    return package


def test_it_compiles_without_a_warning(package: Path) -> None:
    log = (package / "first.log").read_text()
    assert all(f"{name}.cpp" in log for name in OPERATORS)
    assert "-Wall -Wextra" in log
    assert "warning" not in log


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_keeps_the_contract(name: str, on_path: Path, device: torch.device) -> None:
    spec = imported(f"scaffolded_test_{name}", on_path / "tests" / f"test_{name}.py").SPEC
    report = check_operator(Subject.of_spec(spec, [device]))
    assert report.findings == ()
    assert {"reference", "fake-shape", "gradcheck", "refusals", "exports", "compiles", "batch"} <= {*report.passed}


def test_the_folder_around_it_is_refused_with_the_folder_that_works(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(package.parent)
    assert main(["ops", "check", PACKAGE]) == 2
    advised = capsys.readouterr().err.partition("Give the folder of its package: ")[2].strip().removesuffix(".")
    assert advised == str((package / PACKAGE).resolve())
    assert main(["ops", "check", advised, "--operator", "new_rows", "--only", "runs"]) == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_library_needs_torch_2_11_and_no_python(device: str, package: Path) -> None:
    path = package / PACKAGE / f"_{device}.abi3.so"
    if device == "cuda" and not path.exists():
        pytest.skip("there is no nvcc, or torch is a CPU build")
    check_needs(path)


def test_a_model_with_it_is_exported_packaged_and_verified(
    on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = f"{on_path / 'new_rows_model.py'}:spec"
    assert main(["export", model, "-o", "model_aoti.pt2"]) == 0
    assert main(["package", "model_aoti.pt2", "--model", model, "-o", "model.pt2"]) == 0
    assert main(["verify", "model.pt2", "--model", model]) == 0
    assert "ok: " in capfd.readouterr().out.splitlines()[-1]


def test_the_python_code_passes_ruff_and_is_formatted(package: Path) -> None:
    ruff = BESIDE_PYTHON / "ruff"
    output_of(ruff, "check", "--no-cache", package)
    output_of(ruff, "format", "--no-cache", "--check", package)


def test_the_c_plus_plus_code_is_formatted(package: Path) -> None:
    style = f"--style=file:{ROOT / '.clang-format'}"
    output_of(BESIDE_PYTHON / "clang-format", style, "--dry-run", "-Werror", *(package / "csrc").iterdir())


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_cuda_kernels_compile(package: Path) -> None:
    assert compiled_for_cuda(package).stat().st_size > 0


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed a package with the operator `halved`."""
    return scaffolded.installed_package(tmp_path_factory.mktemp("installed"))


def test_an_installed_package_needs_no_flag(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.chdir(tmp_path)
    assert main(["export", f"{installed / 'halved_model.py'}:spec", "-o", "model_aoti.pt2"]) == 0
    monkeypatch.setattr("exportkit.export.models.find_libraries.find_libraries", None)  # which would import the model
    assert main(["package", "model_aoti.pt2", "-o", "model.pt2"]) == 0
    assert main(["verify", "model.pt2"]) == 0
    assert "ok: " in capfd.readouterr().out.splitlines()[-1]
