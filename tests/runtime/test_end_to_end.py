"""Export, package, load: the package is all that the loading process has."""

from __future__ import annotations

import torch

from exportkit.arr_coc import LIBRARIES
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.describe_library import describe_library
from tests.artifacts import artifact
from tests.subprocesses import run_python

MINOR = ".".join(torch.__version__.split(".")[:2])

# Nothing of the exporter, of the operators' Python or of the model's source can be imported, nor g++ be found.
ALONE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("softpool", "tests", "click", "rich") or name.startswith(
            ("exportkit.arr_coc", "exportkit.export", "exportkit.verify", "exportkit.cli")
        ):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch, exportkit
"""
NO_COMPILER = {"PATH": "/nowhere", "CXX": "/nowhere/g++"}


def test_somebody_elses_library_goes_the_whole_way(softpool_package, tmp_path):
    code = """
model = exportkit.load(sys.argv[1])
print(model)
assert len(model.cases) > 0
for case in model.cases:
    answer = model(*case.args, **case.kwargs)
    assert type(answer).__name__ == "Answer" and answer._fields == ("logits", "weights", "positions")
    torch.testing.assert_close(tuple(answer), tuple(case.outputs))
for batch, length in [(1, 2), (16, 64), (5, 7)]:
    answer = model(torch.randn(batch, length, 8), bias=torch.zeros(batch, length))
    assert answer.logits.shape == (batch, 3) and answer.positions.shape == (batch, 2)
print(torch.ops.softpool.pool(torch.ones(1, 2, 3), torch.zeros(1, 2)).tolist())
"""
    with PackageReader(softpool_package) as reader:
        assert [library.torch_bound for library in reader.manifest.libraries] == [MINOR]  # it uses ATen
    said = run_python(ALONE + code, softpool_package, cwd=tmp_path, **NO_COMPILER)
    assert "tokens: float32[batch, length, 8], bias: float32[batch, length]" in said
    assert said.endswith("[[1.0, 1.0, 1.0]]\n")


def test_our_own_operators_travel_in_the_package(tmp_path):
    library = LIBRARIES["cpu"]
    package = tmp_path / "patches.pt2"
    manifest = assemble([artifact("patches")], [(library, describe_library(library))], package)
    assert manifest.libraries[0].torch_bound is None
    assert manifest.operators
    code = """
model = exportkit.load(sys.argv[1])
for case in model.cases:
    got, expected = model(*case.args, **case.kwargs), case.outputs
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5)
cache = sorted(path.name for path in (exportkit.runtime.cache.cache_directory() / "libraries").rglob("*.so"))
print(cache)
"""
    assert run_python(ALONE + code, package, cwd=tmp_path, **NO_COMPILER) == "['libarr_coc_cpu.so']\n"


def test_a_process_that_has_the_operators_already_loads_the_package_beside_them(tmp_path):
    library = LIBRARIES["cpu"]
    package = tmp_path / "patches.pt2"
    assemble([artifact("patches")], [(library, describe_library(library))], package)
    code = """
import sys
import exportkit, exportkit.arr_coc.ops
from exportkit.runtime.cache import cache_directory
model = exportkit.load(sys.argv[1])
case = model.cases[0]
model(*case.args, **case.kwargs)
print((cache_directory() / "libraries").exists())
"""
    assert run_python(code, package, cwd=tmp_path) == "False\n"
