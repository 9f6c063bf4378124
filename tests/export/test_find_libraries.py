"""Operator libraries that are found through the Python module that loads them, while a package is made."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from exportkit.cli.app import main
from exportkit.errors import ModelNotFoundError
from exportkit.export.models.find_libraries import library_files
from exportkit.package.archive import write_package
from exportkit.package.manifest import Manifest
from exportkit.package.trust import Trust
from exportkit.packaging import PackOptions, build_package
from exportkit.progress import Progress, silent
from exportkit.reference_model import ReferenceModel
from exportkit.verify.options import VerifyOptions
from tests.package import samples
from tests.package.c_library import PRELUDE, build, operator_library
from tests.subprocesses import run_python

MODULE = """
from pathlib import Path
import torch
folder = Path(__file__).parent
(folder / "imported").touch()
for name in ("libother.so", "libtoy_cpu.so"):
    torch.ops.load_library(folder / name)
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library of toy::twice, and another one."""
    folder = tmp_path_factory.mktemp("libraries")
    defining = '{ define("toy", "twice(Tensor x) -> Tensor"); kernel("toy", "CPU"); }'
    build(folder, PRELUDE + f"__attribute__((constructor)) static void start(void) {defining}")
    operator_library(folder, "twice(Tensor x) -> Tensor", namespace="other", name="libother.so")
    return folder


@pytest.fixture
def artifact(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `export` writes for MODEL `toy:spec`. The module `toy` loads its operator's library, and another one."""
    shutil.copytree(libraries, tmp_path, dirs_exist_ok=True)
    (tmp_path / "toy.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    records = {name: content for name, content in samples.RECORDS.items() if name != samples.LIBRARY}
    write_package(tmp_path / "artifact.pt2", samples.manifest(libraries=()), records)
    return tmp_path / "artifact.pt2"


def packed(artifact: Path, eager: ReferenceModel, trust: Trust = Trust(), progress: Progress = silent) -> Manifest:
    options = PackOptions(VerifyOptions(eager=eager, trust=trust), verify=False)
    return build_package([artifact], artifact.with_name("out.pt2"), options, progress=progress)[0]


@pytest.mark.slow_but("given1")
@pytest.mark.parametrize("given", [["toy"], []])
def test_the_library_is_the_one_that_the_named_module_or_the_models_loads(artifact: Path, given: list[str]) -> None:
    steps: list[str] = []
    manifest = packed(artifact, ReferenceModel("toy:spec", op_libraries=given), progress=steps.append)
    assert [Path(library.record).name for library in manifest.libraries] == ["libtoy_cpu.so"]
    assert given or f"taking {artifact.with_name('libtoy_cpu.so')}, which toy loads" in steps


@pytest.mark.slow_but("given0")
@pytest.mark.parametrize("given", [["toy"], []])
def test_a_module_that_is_installed_and_declared_may_be_given_as_well(artifact: Path, given: list[str]) -> None:
    """An example's operators were exported with --op-library, and could not be packaged once it was installed."""
    information = artifact.with_name("toy-1.0.dist-info")
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[exportkit.operators]\ntoy = toy\n")
    manifest = packed(artifact, ReferenceModel(op_libraries=given))
    assert [Path(library.record).name for library in manifest.libraries] == ["libtoy_cpu.so"]


def test_a_module_is_left_out_where_the_graph_calls_no_operator() -> None:
    said: list[str] = []
    assert library_files(["json"], [], said.append) == []
    assert said == ["leaving out json: the graph calls no custom operator"]


def test_a_module_that_is_not_there_is_named(artifact: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no module 'nowhere'"):
        packed(artifact, ReferenceModel(op_libraries=["nowhere.ops"]))


def test_what_is_neither_a_file_nor_a_modules_name_is_refused(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["package", str(artifact), "-o", "x.pt2", "--op-library", "build/libtoy.so"]) == 2
    assert "there is no file 'build/libtoy.so', and no Python module can have such a name" in capsys.readouterr().err


def test_export_imports_the_module(artifact: Path) -> None:
    code = """
import torch
from exportkit.export.models.resolve import load_operator_libraries
load_operator_libraries(["toy"])
print(torch.ops.toy.twice.default._schema)
"""
    assert run_python(code, cwd=artifact.parent) == "toy::twice(Tensor x) -> Tensor\n"
