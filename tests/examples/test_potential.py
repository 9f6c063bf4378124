"""The example potential: its operator has gradients of every order, and a wrong one is found by `verify`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.subprocesses import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "potential"
TORCH = Path(torch.__file__).parent

CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, potential
r = torch.rand(5, dtype=torch.float64, requires_grad=True)
centres = torch.rand(3, dtype=torch.float64, requires_grad=True)
call = lambda r, centres: torch.ops.potential.gaussians(r, centres, 0.7, 0)
assert torch.autograd.gradcheck(call, (r, centres)) and torch.autograd.gradgradcheck(call, (r, centres))
torch.library.opcheck(torch.ops.potential.gaussians, (r, centres, 0.7, 1))
"""
VERIFY = """
import json, sys
from pathlib import Path
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolve import resolve
from exportkit.reference_model import ReferenceModel
from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
folder = Path(sys.argv[1])
model, library = f"{folder / 'potential.py'}:spec", folder / "libgaussians.so"
export_program(resolve(model), folder / "program.pt2", TraceOptions(cases=2))
eager = ReferenceModel(model=model, op_libraries=(library,))
report = verify(folder / "program.pt2", VerifyOptions(eager=eager, shapes=2))
print(json.dumps([report.exit_code, [(check.against, check.verdict.kind) for check in report.checks]]))
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, compiled as its README says."""
    folder = tmp_path_factory.mktemp("example") / "potential"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("*.so"))
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-isystem",
               str(TORCH / "include"), "gaussians.cpp", "-o", "libgaussians.so", f"-L{TORCH / 'lib'}",
               "-Wl,--no-as-needed", "-ltorch_cpu"]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True)
    return folder


def verified(folder: Path) -> tuple[int, list[list[str]]]:
    code, checks = json.loads(run_python(VERIFY, folder, cwd=folder, compiler=True).splitlines()[-1])
    return code, checks


def test_the_operator_has_first_and_second_gradients(example: Path) -> None:
    run_python(CHECK, example, cwd=example)


def test_energy_forces_and_second_order_go_the_whole_way(example: Path) -> None:
    code, checks = verified(example)
    assert code == 0
    assert [kind for against, kind in checks if against == "gradients"] == ["gradients_hold"] * 3


def test_a_wrong_gradient_of_an_operator_is_found_though_eager_has_it_too(example: Path, tmp_path: Path) -> None:
    shutil.copytree(example, tmp_path / "potential")
    source = tmp_path / "potential" / "potential.py"
    text = source.read_text()
    injected = text.replace("return slope.sum(1),", "return 1.02 * slope.sum(1),")
    assert injected != text
    source.write_text(injected)
    code, checks = verified(tmp_path / "potential")
    assert code == 20
    assert {kind for against, kind in checks if against == "gradients"} == {"wrong_gradient"}
    assert {kind for against, kind in checks if against in ("cases", "eager")} == {"match"}
