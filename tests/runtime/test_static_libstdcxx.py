"""A model whose compiler linked libstdc++ statically: found where it is made, and harmless where it is loaded.

Its library brings parts of libstdc++ along, and mixes them with those of the process: torch's loader then fails in
std::regex, with std::bad_cast or a crash, unless the process's own libstdc++ is found first.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit import doctor
from exportkit.errors import CompilerError
from exportkit.export.compile import aot_inductor, usable_compiler
from exportkit.package.elf import read_elf
from tests.runtime import tiny
from tests.subprocesses import ROOT, run_python

pytestmark = pytest.mark.slow

COMPILER = ROOT / "tests" / "fixtures" / "static_libstdcxx.sh"

STOCK = """
import sys, torch
torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], "cpu", False, 1, -1)
"""


@pytest.fixture(scope="module")
def static_files() -> dict[str, Path]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile a model with")
    return tiny.tiny_files(COMPILER)


@pytest.fixture(scope="module")
def static_package(static_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("static") / "static.pt2", static_files)


def test_the_model_is_of_the_kind_that_fails(static_files, static_package, tmp_path):
    """The reason for all of the below; a torch that copes with it would make them needless."""
    library = next(file for name, file in static_files.items() if name.endswith(".so"))
    assert read_elf(library).static_libstdcxx
    assert not any(name.startswith("libstdc++") for name in read_elf(library).needed)
    stock = subprocess.run([sys.executable, "-c", STOCK, str(static_package)], capture_output=True, check=False)
    if stock.returncode == 0:
        pytest.skip(f"torch {torch.__version__} and this libstdc++ load it all the same")
    assert stock.returncode < 0 or b"std::bad_cast" in stock.stderr + stock.stdout


@pytest.mark.parametrize("isolate", [False, True])
def test_it_loads_and_answers_in_a_fresh_process(static_package, tmp_path, isolate):
    code = f"""
import sys, exportkit
sys.path.insert(0, sys.argv[2])
import torch
from tests.runtime import tiny
model = exportkit.load(sys.argv[1], isolate={isolate})
args, kwargs = tiny.example()
got, expected = model(*args, **kwargs), tiny.Tiny()(*args, **kwargs)
torch.testing.assert_close(tuple(got["regions"]), tuple(expected["regions"]), rtol=1e-5, atol=1e-5)
print("ran")
"""
    assert run_python(code, static_package, ROOT, cwd=tmp_path) == "ran\n"


def test_it_loads_beside_a_model_that_is_not(static_package, tiny_package):
    with exportkit.load(tiny_package) as usual, exportkit.load(static_package) as static:
        args, kwargs = tiny.example()
        for model in (usual, static, usual):
            assert torch.equal(model(*args, **kwargs)["regions"].doubled, args[0] * 2)


def test_export_refuses_what_such_a_compiler_made(static_files):
    library = next(file for name, file in static_files.items() if name.endswith(".so"))
    with pytest.raises(CompilerError, match="would crash in std::regex") as error:
        aot_inductor._target(torch.device("cpu"), "x86-64-v3", False, [library], needs=[])
    assert "CXX=" in (error.value.hint or "")


def test_doctor_finds_such_a_compiler(monkeypatch):
    """By what it makes of a probe, wherever it is found."""
    monkeypatch.setattr(usable_compiler.shutil, "which", lambda name, **_: str(COMPILER) if "g++" in name else None)
    monkeypatch.delenv("CXX", raising=False)
    finding = doctor._looked("compiler", doctor._compiler)
    assert not finding.ok
    assert f"{COMPILER}: it links libstdc++ statically" in finding.detail
    assert finding.hint
