"""A package whose only custom operators are Triton's carries its kernels inside, and needs no operator library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exportkit.export.models.resolve import resolve
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.manifest import Manifest
from tests.artifacts import artifact
from tests.fixtures import stock_loader
from tests.subprocesses import run_python


@pytest.fixture
def package(tmp_path: Path, device: torch.device) -> Path:
    path = tmp_path / "quantize.pt2"
    assemble([artifact(f"triton-{device.type}")], [], path)
    return path


def manifest_of(package: Path) -> Manifest:
    with PackageReader(package) as reader:
        return reader.manifest


def test_it_lists_no_operator_and_no_library(package: Path):
    manifest = manifest_of(package)
    assert manifest.operators == ()
    assert manifest.libraries == ()


@pytest.mark.cuda
def test_its_kernels_are_in_the_archive(tmp_path: Path):
    with PackageReader(artifact("triton-cuda")) as reader:
        code = b"".join(reader.read(name) for name in reader.names if name.endswith((".so", ".cubin")))
    for kernel in (b"softmax_rows", b"softmax_long_row", b"rms_norm_quantize_rows", b"add_elements"):
        assert kernel in code, kernel


def test_it_loads_in_plain_python(package: Path, device: torch.device, tmp_path: Path):
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("exportkit.arr_coc", "exportkit.export")):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch, exportkit
model = exportkit.load(sys.argv[1])
for case in model.cases:
    answer = model(*(argument.to(sys.argv[2]) for argument in case.args))
    for name in ("softmax", "columns", "scale"):
        torch.testing.assert_close(answer[name].cpu(), case.outputs[name].cpu(), rtol=1e-4, atol=1e-6)
    assert (answer["quantized"].cpu() - case.outputs["quantized"].cpu().int()).abs().max() <= 1
assert not hasattr(torch.ops.arr_coc_triton, "softmax")
print(len(model.cases))
"""
    assert int(run_python(code, package, device, cwd=tmp_path)) > 0


def test_it_loads_in_cpp(package: Path, device: torch.device):
    (target,) = manifest_of(package).targets
    stock_loader.check("Quantize", package, target.name, device.type)


def test_a_program_of_them_travels_and_is_compiled_elsewhere():
    resolved = resolve(str(artifact("triton-program")))
    assert resolved.spec.model is not None
