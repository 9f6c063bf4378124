"""`exportkit ops new`: which names it takes, where it writes, and that it overwrites nothing."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from torch.utils import cpp_extension

from exportkit.cli import main
from exportkit.cli.ops_new import KINDS as SHOWN_KINDS
from exportkit.operators.scaffold.new_operator import KINDS
from tests.artifacts import ROOT
from tests.subprocesses import output_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_command_line_knows_the_kinds() -> None:
    assert SHOWN_KINDS == KINDS


def test_a_package_is_written_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "new", "leaky", "--package", "their_ops"]) == 0
    written = files(folder / "their_ops")
    assert set(written) == {
        ".github/workflows/tests.yml",
        ".gitignore",
        "README.md",
        "csrc/common.cuh",
        "csrc/common.h",
        "csrc/leaky.cpp",
        "csrc/leaky.cu",
        "csrc/leaky.h",
        "leaky_model.py",
        "pyproject.toml",
        "setup.py",
        "tests/conftest.py",
        "tests/test_leaky.py",
        "their_ops/__init__.py",
        "their_ops/_common.py",
        "their_ops/leaky.py",
    }
    assert not [path for path, text in written.items() if "$op" in text or "$package" in text or "${op}" in text]
    needing = {path for path, text in written.items() if re.search("(import|from) exportkit", text)}
    assert needing == {"leaky_model.py", "tests/test_leaky.py"}  # the package itself depends on torch alone
    out = capsys.readouterr().out
    next_steps = f"cd {folder / 'their_ops'} && python setup.py build_ext --inplace && pytest"
    assert out.splitlines()[-1] == f"Next: {next_steps}"
    assert set(out.splitlines()[:-1]) == {str(folder / "their_ops" / path) for path in written}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_its_setup_gives_nvcc_options_that_it_knows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["ops", "new", "leaky", "--package", "their_ops"])
    monkeypatch.chdir("their_ops")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(folder))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")  # what setup.py sets does not outlive this test
    built: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", built.update)
    runpy.run_path("setup.py", run_name="__main__")
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0+PTX"  # torch fails where there is no GPU to look at
    cuda = built["ext_modules"][1]
    options = [*cuda.extra_compile_args["nvcc"], "-std=c++20", "-c", *cuda.sources]
    output_of("nvcc", "--dryrun", *options)


@pytest.mark.parametrize("where", ["beside", "inside", "inside without --package", "--output"])
def test_a_second_operator_is_added_to_the_package(where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["ops", "new", "leaky", "--package", "their_ops"]) == 0
    before = files(folder / "their_ops")
    arguments = ["--package", "their_ops"]
    if where.startswith("inside"):
        monkeypatch.chdir(folder / "their_ops")
    if where == "inside without --package":
        arguments = []
    if where == "--output":
        (folder / "their_ops").rename(folder / "moved")
        arguments += ["--output", "moved"]
    assert main(["ops", "new", "energy", "--kind", "reduction", *arguments]) == 0
    after = files(folder / ("moved" if where == "--output" else "their_ops"))
    assert set(after) - set(before) == {
        "csrc/block_sum.cuh",
        "csrc/energy.cpp",
        "csrc/energy.cu",
        "csrc/energy.h",
        "energy_model.py",
        "tests/test_energy.py",
        "their_ops/energy.py",
    }
    initial = "their_ops/__init__.py"
    assert after[initial].splitlines()[2:] == [
        "from their_ops._common import LIBRARIES as LIBRARIES",
        "from their_ops.energy import energy as energy",
        "from their_ops.leaky import leaky as leaky",
    ]
    assert {path: text for path, text in after.items() if path in before and path != initial} == {
        path: text for path, text in before.items() if path != initial
    }


def test_what_the_user_wrote_into_init_stays(folder: Path) -> None:
    main(["ops", "new", "leaky", "--package", "their_ops"])
    initial = folder / "their_ops" / "their_ops" / "__init__.py"
    initial.write_text('"""Mine."""\n\nfrom their_ops.leaky import leaky as leaky\n\nVERSION = "3"\n')
    assert main(["ops", "new", "scaled", "--package", "their_ops"]) == 0
    assert initial.read_text() == (
        '"""Mine."""\n\nfrom their_ops.leaky import leaky as leaky\nfrom their_ops.scaled import scaled as scaled\n'
        '\nVERSION = "3"\n'
    )
    initial.write_text("import their_ops._common\n")
    assert main(["ops", "new", "third", "--package", "their_ops"]) == 0
    assert initial.read_text() == "import their_ops._common\nfrom their_ops.third import third as third\n"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a refused command said, and its hint. Nothing was written."""
    before = files(Path.cwd())
    assert main(["ops", "new", *arguments, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert files(Path.cwd()) == before
    assert error["hint"]
    return f"{error['message']}\n{error['hint']}"


@pytest.mark.parametrize(
    "name",
    ["Leaky", "leaky-relu", "2d", "_hidden", "a__b", "relu_", "", "lambda", "naïve", "a.b", "../x", "x;y", "a" * 65],
)
def test_a_name_that_is_no_plain_identifier_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be the name of an operator" in refused(capsys, name, "--package", "their_ops")
    assert "cannot be the name of a package" in refused(capsys, "leaky", "--package", name or "_")


HIDING = {
    "aten": "torch has the namespace",
    "higher_order": "torch has the namespace",
    "double": "means something else",
    "index": "means something else",
    "json": "Python has a module of that name",
    "pytest": "remove that package (pip uninstall pytest)",
    "exportkit": "Python has a module of that name",
    "tests": "means the package's tests",
}
USED = ("torch", "ops", "name", "check_floating", "float")


@pytest.mark.parametrize(
    ("name", "package", "why"),
    [
        *((name, "their_ops", f"an operator cannot be called {name!r}") for name in USED),
        *(("leaky", package, why) for package, why in HIDING.items()),
    ],
)
def test_a_name_that_the_written_code_uses_or_that_would_hide_something_is_refused(
    name: str, package: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(capsys, name, "--package", package)


def test_an_existing_file_is_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "their_ops").mkdir()
    (folder / "their_ops" / "setup.py").write_text("mine")
    assert "has setup.py already" in refused(capsys, "leaky", "--package", "their_ops")
    assert "has setup.py already" in refused(capsys, "leaky", "--package", "other_ops", "--output", "their_ops")
    (folder / "their_ops" / "setup.py").rename(folder / "their_ops" / "LICENSE")
    assert main(["ops", "new", "leaky", "--package", "their_ops"]) == 0
    capsys.readouterr()
    assert "csrc/leaky.h" in refused(capsys, "leaky", "--package", "their_ops", "--kind", "rows")
    (folder / "their_ops" / "csrc" / "other.cu").symlink_to("nowhere")
    assert "csrc/other.cu" in refused(capsys, "other", "--package", "their_ops")


def test_without_a_package_there_must_be_one_and_a_checkout_says_what_to_copy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has no package with operators" in refused(capsys, "leaky")
    monkeypatch.chdir(ROOT / "docs" / "adr")
    assert f"copy the one that {ROOT / 'CONTRIBUTING.md'} names" in refused(capsys, "leaky")
