"""A package of every format version that was released loads and answers as recorded, forever."""

from __future__ import annotations

from pathlib import Path

import pytest

from exportkit.libraries import host_platform
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import FORMAT_VERSION
from exportkit.package.trust import check_trust
from tests.fresh import run_python
from tests.golden.make import MAX_BYTES

PACKAGES = sorted(Path(__file__).parent.glob("format-*.pt2"))

# In a process of its own, which has only what travels in the package.
REPLAY = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("exportkit.arr_coc", "exportkit.operators", "exportkit.export", "tests")):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch, exportkit
model = exportkit.load(sys.argv[1], device="cpu")
tolerances = [output.tolerance for output in model.manifest.call.outputs]
assert len(model.cases) == 4
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


def test_every_format_version_has_one() -> None:
    versions = {int(path.name.split("-")[1]) for path in PACKAGES}
    assert versions == set(range(1, FORMAT_VERSION + 1)), "tests/golden/make.py makes the missing one"
    assert all(path.stat().st_size <= MAX_BYTES for path in PACKAGES)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_it_reads_on_any_machine(package: Path) -> None:
    with PackageReader(package) as reader:
        reader.verify()
        assert f"format-{reader.manifest.format_version}-cpu.pt2" == package.name


@pytest.mark.parametrize(
    ("version", "key"),
    [(1, "signature-1.pem"), (1, "model-signing-1.1.1.pem")],
)
def test_signatures_of_every_form_hold(version: int, key: str) -> None:
    folder = Path(__file__).parent
    with PackageReader(folder / f"format-{version}-cpu.pt2") as reader:
        (signer,) = check_trust(reader, folder / key)
    assert signer.source == str(folder / key)


@pytest.mark.skipif(host_platform() != "linux-x86_64", reason="the packages are compiled for linux-x86_64")
@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_it_loads_and_answers_as_recorded(package: Path, tmp_path: Path) -> None:
    said = run_python(REPLAY, package, cwd=tmp_path, EXPORTKIT_CACHE=str(tmp_path / "cache"))
    assert package.name.startswith(f"format-{said.strip()}-")
