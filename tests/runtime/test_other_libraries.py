"""Operators of others: of every shape, in libraries that need others, and registered in ways that ours are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from exportkit import load
from exportkit.errors import NoTargetError
from exportkit.packaging import PackOptions, build_package
from exportkit.reference_model import ReferenceModel
from exportkit.runtime.native import why_unusable
from exportkit.verify.options import VerifyOptions
from tests.artifacts import PASSES_DTYPES, ROOT, artifact, runs_op_shapes
from tests.fixtures import stable_library
from tests.package import c_library
from tests.runtime import exportkit_run
from tests.subprocesses import run_exportkit, run_python

SOURCE = ROOT / "tests" / "export" / "op_shapes.cpp"


def _options(verify: bool) -> PackOptions:
    library = stable_library.build(SOURCE)
    eager = ReferenceModel(op_libraries=[library])
    return PackOptions(VerifyOptions(against="cases", device="cpu", eager=eager), verify=verify)


@pytest.mark.skipif(PASSES_DTYPES, reason="torch 2.12 and newer pass the dtype")
def test_a_torch_that_passes_other_dtypes_to_operators_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "shapes.pt2"
    build_package([artifact("op-shapes")], package, _options(verify=False))
    with pytest.raises(NoTargetError, match=r"it needs torch 2\.12 or newer, this is 2\.11"):
        load(package)


@pytest.mark.slow
@runs_op_shapes
def test_operators_of_every_shape_are_packaged_and_compute_what_they_are_named_after(tmp_path: Path) -> None:
    package = tmp_path / "shapes.pt2"
    manifest, report = build_package([artifact("op-shapes")], package, _options(verify=True))
    assert report is not None
    assert report.exit_code == 0
    assert {operator.name.removeprefix("op_shapes::") for operator in manifest.operators} == {
        "add_out", "twice_", "scaled", "scaled.Tensor", "sum_of", "halves", "filled", "negated", "positive"
    }  # fmt: skip
    x = torch.randn(7, 3)
    expected = {
        "total": 2 * x + 1,
        "doubled": 2 * x,
        "number": 3 * x,
        "tensor": 5 * x,
        "sum": 6.5 * x,
        "filled": torch.ones(7, 3, dtype=torch.int64),
        "like": torch.zeros(7, 3),
        "minus": -x,
        "positive": x.relu().sum(),
        "added": torch.cat([2 * x[:1].bfloat16(), x[1:].bfloat16()]),
    }
    with load(package) as model:
        torch.testing.assert_close(model(x), expected)


# --- libraries that need others ---------------------------------------------------------------------------------------

MODULE = """
extern "C" void* PyModule_Create2(void*, int);
extern "C" void* PyExc_ValueError;
extern "C" void* THPVariableClass;
extern "C" void* _PyWeakref_RefType;
extern "C" __attribute__((visibility("default"))) void* PyInit_first() {
  const bool none = PyExc_ValueError == THPVariableClass || _PyWeakref_RefType == THPVariableClass;
  return none ? nullptr : PyModule_Create2(nullptr, 0);
}
"""
PYTHON = (f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_python")


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """op-shapes with its operators in two libraries, which both call a third. The libraries are then removed.

    The first is a Python module too, as torch's CppExtension and pybind11 build it.
    """
    folder = tmp_path_factory.mktemp("libraries")
    addition = "a.const_data_ptr<float>()[i] + b.const_data_ptr<float>()[i]"
    called = SOURCE.read_text().replace(addition, "added(a.const_data_ptr<float>()[i], b.const_data_ptr<float>()[i])")
    called = called.replace("namespace {", 'extern "C" float added(float, float);\n\nnamespace {')
    positive = [line for line in called.splitlines(keepends=True) if '("positive' in line]
    first = called
    for line in positive:
        first = first.replace(line, "")
    first += MODULE
    second = called[: called.index("STABLE_TORCH_LIBRARY(")] + (
        f"STABLE_TORCH_LIBRARY_FRAGMENT(op_shapes, m) {{ {positive[0]} }}\n"
        f"STABLE_TORCH_LIBRARY_IMPL(op_shapes, CPU, m) {{ {positive[1]} }}\n"
    )
    c_library.build(folder, "float added(float a, float b) { return a + b; }", "-Wl,-soname,libz.so", name="libz.so")
    beside = ("-Wl,-rpath,$ORIGIN", f"-L{folder}")
    for name, text, needs in (
        ("second", second, ["-lz"]),
        ("first", first, ["-lz", "-lsecond", *PYTHON]),
    ):
        shutil.copy(stable_library.build(SOURCE, text, *beside, *needs, name=name), folder)
    path = tmp_path_factory.mktemp("package") / "shapes.pt2"
    eager = ReferenceModel(op_libraries=[folder / "libfirst.so"])
    unverified = PackOptions(VerifyOptions(eager=eager), verify=False)
    build_package([artifact("op-shapes")], path, unverified)
    shutil.rmtree(folder)
    return path


@pytest.mark.slow
@runs_op_shapes
def test_python_loads_a_library_and_those_beside_it(beside: Path, tmp_path: Path) -> None:
    code = """
import sys, torch, exportkit
x = torch.randn(5, 3)
answer = exportkit.load(sys.argv[1])(x)
torch.testing.assert_close(answer["total"], 2 * x + 1)
torch.testing.assert_close(answer["positive"], x.relu().sum())
exportkit.load(sys.argv[1])
print("done")
"""
    assert run_python(code, beside, cwd=tmp_path, EXPORTKIT_CACHE=str(tmp_path / "cache")) == "done\n"


@pytest.mark.slow
@runs_op_shapes
@pytest.mark.skipif(why_unusable() is not None, reason="the C++ runtime is not built for this torch")
def test_programs_without_python_load_them_as_well(beside: Path) -> None:
    assert exportkit_run.load(beside)["ok"] is True


# --- registered in other ways -----------------------------------------------------------------------------------------

MODELS = ROOT / "tests" / "runtime" / "foreign_models.py"


@pytest.fixture(scope="module")
def foreign_library() -> Path:
    return stable_library.build_with_aten(MODELS.with_name("foreign_operators.cpp"))


@pytest.fixture(scope="module")
def foreign(foreign_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    for words in (
        ["export", f"{MODELS}:foreign", "--op-library", str(foreign_library), "-o", "exported.pt2"],
        ["package", "exported.pt2", "--op-library", str(foreign_library), "-o", "package.pt2"],
    ):
        done = run_exportkit(*words, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "package.pt2"


@runs_op_shapes  # it passes a dtype, too
@pytest.mark.slow
def test_the_package_answers_where_nobody_has_defined_the_operators(foreign, tmp_path, runtime):
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
    said = run_python(code, foreign, cwd=tmp_path)
    assert said == "foreign_python::twice(Tensor x) -> Tensor\n"


@runs_op_shapes
@pytest.mark.slow
def test_a_result_that_the_operator_leaves_undefined_is_named(foreign_library, tmp_path):
    done = run_exportkit(
        "export", f"{MODELS}:undefined", "--op-library", str(foreign_library), "-o", "x.pt2", cwd=tmp_path
    )
    assert done.returncode == 5
    assert "eager answers None in output 0, of which the program makes a tensor" in done.stderr


@runs_op_shapes
@pytest.mark.slow
def test_it_runs_without_python(foreign):
    assert exportkit_run.run(foreign).code == 0
