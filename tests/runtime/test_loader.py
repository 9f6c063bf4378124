"""Loading: everything is known to fit before anything of the package is executed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import exportkit
from exportkit.errors import DigestMismatchError, NoTargetError, SchemaChangedError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Operator
from tests.fixtures.softpool_library import build
from tests.runtime import tiny
from tests.subprocesses import run_interpreter, run_python

RECORD = tiny.library(b"").record
POOL = "softpool::pool(Tensor x, Tensor weights, float temperature=1.) -> Tensor"
PEAKS = "softpool::peaks(Tensor weights, int count) -> (Tensor values, Tensor indices)"


def open_files() -> set[str]:
    files = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            files.add(os.readlink(fd))
        except FileNotFoundError:
            continue  # the one that listed them
    return files


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"runners": each}, "runners must be a positive integer") for each in (0, -1, 1.0, True, "2", None)),
        *(({"verify": each}, "verify must be 'once' or 'always', got") for each in ("twice", True, None, "")),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"source": "nothing.pt2"}, r"nothing\.pt2"),
    ],
)
def test_a_wrong_argument_is_the_callers_mistake(tiny_package, wrong, message):
    with pytest.raises(UsageError, match=message):
        exportkit.load(**{"source": tiny_package, **wrong})


@pytest.mark.parametrize("device", ["auto", "cpu", torch.device("cpu")])
def test_devices_are_given_by_name_or_as_torch_devices(tiny_package, device):
    with exportkit.load(str(tiny_package), device=device, runners=2) as model:
        args, kwargs = tiny.example()
        assert model(*args, **kwargs)["regions"].mean.shape == (3, 3)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_target_is_run_by_name_and_only_that_one(tiny_files, tmp_path, isolate):
    targets = (
        tiny.target(name="better", cpu_isa="x86-64"),
        tiny.target(name="plain"),
        tiny.target(name="arm", platform="linux-aarch64"),
    )
    package = tiny.write(tmp_path / "several.pt2", tiny_files, targets=targets)
    with exportkit.load(package, isolate=isolate) as model:
        assert model.target.name == "better"
    with exportkit.load(package, target="plain", isolate=isolate) as model:
        assert model.target.name == "plain"
    with pytest.raises(NoTargetError, match="arm: it is for linux-aarch64") as error:
        exportkit.load(package, target="arm", isolate=isolate)
    assert "plain" not in str(error.value)
    assert str(package) not in open_files()
    for name in ("plai", "Plain", ""):
        with pytest.raises(UsageError, match=rf"no target '{name}'\n  It has: better, plain, arm\."):
            exportkit.load(package, target=name, isolate=isolate)


# --- the package ------------------------------------------------------------------------------------------------------


def test_models_of_one_package_share_its_code_and_nothing_else(tiny_package):
    args, kwargs = tiny.example()
    with exportkit.load(tiny_package) as first, exportkit.load(tiny_package) as second:
        expected = first(*args, **kwargs)["regions"]
        first.close()
        for got, mean in zip(second(*args, **kwargs)["regions"], expected):
            assert torch.equal(got, mean)
        maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[-1] for line in maps if line.endswith(".so")}
    assert len([path for path in mapped if f"{os.environ['EXPORTKIT_CACHE']}/targets/" in path]) == 1


def after_the_checks(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Has a load do this once it has checked the package, and before it loads anything of it."""
    verify_once = PackageReader.verify_once

    def verify_and_do(*args: Any, **kwargs: Any) -> None:
        verify_once(*args, **kwargs)
        do()

    monkeypatch.setattr(PackageReader, "verify_once", verify_and_do)


def test_the_file_that_was_checked_is_the_file_that_is_loaded(tiny_package, tmp_path, monkeypatch):
    package = tmp_path / "replaced.pt2"
    package.write_bytes(tiny_package.read_bytes())
    evil = tmp_path / "evil.pt2"
    evil.write_bytes(b"another archive")
    after_the_checks(monkeypatch, lambda: evil.replace(package))
    with exportkit.load(package) as model:
        args, kwargs = tiny.example()
        assert model(*args, **kwargs)["regions"].mean.isfinite().all()
        assert len(model.cases) == 2
        assert model.cases[0].sizes == {"batch": 1, "gh": 1}
    assert not evil.exists()


# --- operator libraries -----------------------------------------------------------------------------------------------


def test_an_operator_whose_schema_changed_is_refused_with_both(tiny_files, tmp_path):
    content = build().read_bytes()
    old = "softpool::pool(Tensor x, Tensor weights) -> Tensor"
    operator = Operator(name="softpool::pool", schema=old)
    package = tiny.write(
        tmp_path / "old.pt2",
        tiny_files,
        extra={RECORD: content},
        libraries=(tiny.library(content, old, PEAKS),),
        operators=(operator,),
    )
    with pytest.raises(SchemaChangedError) as error:
        exportkit.load(package)
    assert f"registered as {POOL}; the package was made with {old}" in str(error.value)


def test_an_operator_that_cannot_be_defined_is_named(tiny_files, tmp_path, runtime):
    content, schema = build().read_bytes(), "softpool_python::f(Tensor x, Device at=cpu) -> Tensor"
    package = tiny.write(
        tmp_path / "undefined.pt2",
        tiny_files,
        extra={RECORD: content},
        libraries=(tiny.library(content, POOL, PEAKS, adds_to=("softpool_python::f",)),),
        operators=(Operator(name="softpool_python::f", schema=schema),),
    )
    with pytest.raises(
        SchemaChangedError, match=r"softpool_python::f cannot be defined here: torch cannot read "
    ) as said:
        exportkit.load(package)
    assert "before the package is loaded" in str(said.value)


# --- a process of its own ---------------------------------------------------------------------------------------------


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
import ctypes, exportkit, torch
from exportkit.package.structure import flatten
def leaves(value):
    return flatten(value, torch.is_tensor)[1]
model = exportkit.load(sys.argv[1])
for case in model.cases:
    answer = model(*case.args, **case.kwargs)
    torch.testing.assert_close(leaves(answer), leaves(case.outputs), rtol=1e-5, atol=1e-5)
assert hasattr(ctypes.CDLL(None), "_ZNSt6localeC1Ev"), "the process's libstdc++ is there for all"
print(type(answer).__name__, len(model.cases), [name for name in sys.modules if name.startswith("torch._inductor")])
"""


@pytest.mark.parametrize(("name", "said"), [("tiny", "dict 2 []\n"), ("softpool", "Answer 4 []\n")])
def test_it_loads_where_there_is_no_exporter_no_model_source_and_no_compiler(request, tmp_path, name, said):
    package = request.getfixturevalue(f"{name}_package")
    with PackageReader(package) as reader:  # softpool uses ATen
        assert all(torch.__version__.startswith(f"{each.torch_bound}.") for each in reader.manifest.libraries)
    assert run_python(ALONE, package, cwd=tmp_path, PATH="/nowhere", CXX="/nowhere/g++") == said


def test_exportkit_itself_imports_what_is_asked_for(tmp_path):
    code = """
import sys, exportkit
assert "torch" not in sys.modules
assert {"load", "Model", "ExportSpec", "Tolerance"} <= set(dir(exportkit))
exportkit.Tolerance, exportkit.ExportSpec
assert "torch" not in sys.modules
exportkit.load
assert "torch" in sys.modules and "exportkit.arr_coc.ops" not in sys.modules
try:
    exportkit.nothing
except AttributeError as error:
    print(error)
"""
    assert run_interpreter(code, cwd=tmp_path) == "module 'exportkit' has no attribute 'nothing'\n"


@pytest.mark.parametrize("by", ["the same", "another"])
def test_a_package_that_is_written_to_while_it_loads_is_refused(tiny_package, tiny_files, tmp_path, monkeypatch, by):
    path = tmp_path / "tiny.pt2"
    shutil.copy(tiny_package, path)
    os.utime(path, ns=(0, 0))
    other = tiny_package if by == "the same" else tiny.write(tmp_path / "other.pt2", tiny_files)
    after_the_checks(monkeypatch, lambda: path.write_bytes(other.read_bytes()))
    with pytest.raises(DigestMismatchError, match=r"tiny\.pt2 was written to while it was open|record data/"):
        exportkit.load(path)
    assert str(path) not in open_files()


def test_a_name_that_is_no_utf_8_is_one_as_well(tiny_package, tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt2"))
    shutil.copy(tiny_package, path)
    with exportkit.load(path) as model:
        args, kwargs = tiny.example()
        assert model(*args, **kwargs)["regions"].mean.shape == (3, 3)
