"""What eager refuses, the artifact must refuse; what ends eager's process says nothing about the artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from exportkit.export.artifact import export_aoti
from exportkit.export.models.resolve import resolve
from exportkit.reference_model import ReferenceModel
from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
from tests.fixtures import stable_library

# A kernel that reads at any index that it is given would end the process at most of those that are out of range.
SOURCE = """
#include <csignal>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

Tensor taken(const Tensor& rows, const Tensor& places) {
  const Tensor x = torch::stable::contiguous(rows), index = torch::stable::contiguous(places);
  Tensor out = torch::stable::new_empty(x, index.sizes());
  for (int64_t i = 0; i < index.numel(); ++i) {
    const int64_t place = index.const_data_ptr<int64_t>()[i];
    if (place < 0 || place >= x.numel()) std::raise(SIGSEGV);
    out.mutable_data_ptr<float>()[i] = x.const_data_ptr<float>()[place];
  }
  return out;
}

STABLE_TORCH_LIBRARY(exportkit_unchecked, m) { m.def("taken(Tensor x, Tensor index) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(exportkit_unchecked, CPU, m) { m.impl("taken", TORCH_BOX(&taken)); }
"""
MODEL = """
import torch
from exportkit import ExportSpec

@torch.library.register_fake("exportkit_unchecked::taken")
def _(x, index):
    return x.new_empty(index.shape)

class Taken(torch.nn.Module):
    def forward(self, x, index):
        return torch.ops.exportkit_unchecked.taken(x, index)

def spec():
    return ExportSpec(Taken(), (torch.rand(9), torch.tensor([3, 1, 4])), dynamic_shapes={"index": {0: "n[1:9]"}})
"""


@pytest.mark.process
def test_a_kernel_that_does_not_check_its_indices_is_compared_at_those_that_it_takes(tmp_path: Path) -> None:
    library = stable_library.build(Path(__file__), SOURCE, name="unchecked")
    (tmp_path / "taken.py").write_text(MODEL)
    artifact, model = tmp_path / "taken.pt2", f"{tmp_path}/taken.py:spec"
    export_aoti(resolve(model, op_libraries=[library]), artifact)
    report = verify(artifact, VerifyOptions(eager=ReferenceModel(model=model, op_libraries=(library,))))
    assert {check.label: check.verdict.message for check in report.checks if check.failed} == {}
    assert [check for check in report.checks if check.against == "eager"]
