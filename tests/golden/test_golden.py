"""A package of every format version that was released loads and answers as recorded, forever."""

from __future__ import annotations

from pathlib import Path

import pytest

from exportkit.libraries import host_platform
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import FORMAT_VERSION
from exportkit.package.trust import demand
from tests.golden.make import MAX_BYTES
from tests.subprocesses import run_python

PACKAGES = sorted(Path(__file__).parent.glob("format-*.pt2"))
WITH_STATE = sorted(Path(__file__).parent.glob("state-*.pt2"))

# In a process of its own, which has only what travels in the package.
LOAD = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("exportkit.arr_coc", "exportkit.operators", "exportkit.export", "tests")):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch, exportkit
model = exportkit.load(sys.argv[1], device="cpu")
assert len(model.cases) == 4
"""
REPLAY = (
    LOAD
    + """
tolerances = [output.tolerance for output in model.manifest.call.outputs]
for case in model.cases:
    answer = model(*case.args, **case.kwargs)
    assert list(answer) == ["best", "scores"] and answer["best"]._fields == ("features", "indices")
    flat = [*answer["best"], answer["scores"]]
    expected = [*case.outputs["best"], case.outputs["scores"]]
    for one, other, tolerance in zip(flat, expected, tolerances, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance.rtol, atol=tolerance.atol)
assert model(torch.randn(16, 256, 8), bias=torch.zeros(8), mode="softmax")["scores"].shape == (16, 256)
print(model.manifest.format_version)
"""
)
REPLAY_STATE = (
    LOAD
    + """
def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

for case in model.cases:
    session = model.session(batch=case.calls[0].sizes["batch"])
    other = session.fork()
    for call in case.calls:
        args = [argument.clone() for argument in call.args]
        close(getattr(session, call.method)(*args), call.outputs)
        for name, written in call.written.items():
            close(args[["features", "seen"].index(name)], written)
    assert dict(session.state).keys() == case.state.keys() == {"memory", "count"}
    for name, last in case.state.items():
        close(session.state[name], last)
    close(other.state["memory"], torch.linspace(-1, 1, 4).expand_as(other.state["memory"]))
    assert other.state["count"] == 0
print(model.manifest.format_version)
"""
)


def test_every_format_version_has_one() -> None:
    for found in (PACKAGES, WITH_STATE):
        versions = {int(path.name.split("-")[1]) for path in found}
        assert versions == set(range(1, FORMAT_VERSION + 1)), "tests/golden/make.py makes the missing one"
        assert all(path.stat().st_size <= MAX_BYTES for path in found)


@pytest.mark.parametrize("package", [*PACKAGES, *WITH_STATE], ids=lambda path: path.name)
def test_it_reads_on_any_machine(package: Path) -> None:
    with PackageReader(package) as reader:
        reader.verify()
        assert package.name.endswith(f"-{reader.manifest.format_version}-cpu.pt2")
        for index in range(len(reader.manifest.cases)):
            reader.read_case(index)


@pytest.mark.parametrize("name", ["signature-1.pem", "model-signing-1.1.1.pem"])
def test_signatures_of_every_form_hold(name: str) -> None:
    key = Path(__file__).with_name(name)
    with PackageReader(key.with_name("format-1-cpu.pt2"), demand=demand(key)) as reader:
        (signer,) = reader.signers
    assert signer.source == str(key)


@pytest.mark.skipif(host_platform() != "linux-x86_64", reason="the packages are compiled for linux-x86_64")
@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_it_loads_and_answers_as_recorded(package: Path, tmp_path: Path) -> None:
    said = run_python(REPLAY, package, cwd=tmp_path, EXPORTKIT_CACHE=str(tmp_path / "cache"))
    assert package.name.startswith(f"format-{said.strip()}-")


@pytest.mark.skipif(host_platform() != "linux-x86_64", reason="the packages are compiled for linux-x86_64")
@pytest.mark.parametrize("package", WITH_STATE, ids=lambda path: path.name)
def test_its_sessions_answer_and_end_as_recorded(package: Path, tmp_path: Path) -> None:
    said = run_python(REPLAY_STATE, package, cwd=tmp_path, EXPORTKIT_CACHE=str(tmp_path / "cache"))
    assert package.name.startswith(f"state-{said.strip()}-")
