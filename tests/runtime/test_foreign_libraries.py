"""Libraries that register operators in ways that exportkit's own do not go to a package that needs nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.artifacts import ROOT, runs_op_shapes
from tests.fixtures import stable_library
from tests.runtime import exportkit_run
from tests.subprocesses import run_exportkit, run_python

MODELS = ROOT / "tests" / "runtime" / "foreign_models.py"

pytestmark = [runs_op_shapes, pytest.mark.slow]  # it passes a dtype, too


@pytest.fixture(scope="module")
def library() -> Path:
    return stable_library.build_with_aten(MODELS.with_name("foreign_operators.cpp"))


@pytest.fixture(scope="module")
def package(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    for words in (
        ["export", f"{MODELS}:foreign", "--op-library", str(library), "-o", "exported.pt2"],
        ["package", "exported.pt2", "--op-library", str(library), "-o", "package.pt2"],
    ):
        done = run_exportkit(*words, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "package.pt2"


def test_the_package_answers_where_nobody_has_defined_the_operators(package, tmp_path, runtime):
    code = """
import sys, torch, exportkit
x = torch.randn(7, 3)
more = 3 * x + 1
parts = more * x + more.sum() + more
twice = 2 * x
expected = {"parts": parts, "doubled": twice + 1, "all": 2 * twice + 2, "converted": x.double() + 7, "python": twice}
expected |= {"old": twice, "halved": x / 2}
for _ in range(2):  # the second one finds the operators defined
    with exportkit.load(sys.argv[1]) as model:
        torch.testing.assert_close(model(x), expected)
print(torch.ops.foreign_python.twice.default._schema)
"""
    said = run_python(code, package, cwd=tmp_path)
    assert said == "foreign_python::twice(Tensor x) -> Tensor\n"


def test_a_result_that_the_operator_leaves_undefined_is_named(library, tmp_path):
    done = run_exportkit("export", f"{MODELS}:undefined", "--op-library", str(library), "-o", "x.pt2", cwd=tmp_path)
    assert done.returncode == 5
    assert "eager answers None in output 0, of which the program makes a tensor" in done.stderr


def test_it_runs_without_python(package):
    assert exportkit_run.run(package).code == 0
