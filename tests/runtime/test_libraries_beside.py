"""A library that needs others beside it, which go with it into the package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from exportkit.package.archive import PackageReader
from exportkit.packaging import PackOptions, build_package
from exportkit.reference_model import ReferenceModel
from exportkit.runtime.native import why_unusable
from exportkit.verify.options import VerifyOptions
from tests.artifacts import ROOT, artifact, runs_op_shapes
from tests.fixtures import stable_library
from tests.package import c_library
from tests.runtime import exportkit_run
from tests.subprocesses import run_python

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
SOURCE = ROOT / "tests" / "export" / "op_shapes.cpp"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_they_are_in_the_package_in_loading_order(package: Path) -> None:
    with PackageReader(package) as reader:
        names = [Path(library.record).name for library in reader.manifest.libraries]
    assert names == ["libz.so", "libsecond.so", "libfirst.so"]


@runs_op_shapes
def test_python_loads_them(package: Path, tmp_path: Path) -> None:
    code = """
import sys, torch, exportkit
x = torch.randn(5, 3)
answer = exportkit.load(sys.argv[1])(x)
torch.testing.assert_close(answer["total"], 2 * x + 1)
torch.testing.assert_close(answer["positive"], x.relu().sum())
exportkit.load(sys.argv[1])
print("done")
"""
    assert run_python(code, package, cwd=tmp_path, EXPORTKIT_CACHE=str(tmp_path / "cache")) == "done\n"


@runs_op_shapes
@pytest.mark.skipif(why_unusable() is not None, reason="the C++ runtime is not built for this torch")
def test_programs_without_python_load_them(package: Path) -> None:
    assert exportkit_run.load(package)["ok"] is True
