"""A model in 16 bits whose path eager rounds to ties: export says what makes the code round alike, and it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from exportkit import ExportSpec
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.trace.trace import trace
from tests.export.compiled_code import compile_code


class BestPath(torch.nn.Module):
    """Viterbi's algorithm: of the ways to each label the best, then back from the best label."""

    def __init__(self) -> None:
        super().__init__()
        self.change = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, scores: Tensor) -> Tensor:
        best, back = scores[:, 0], []
        for step in range(1, scores.shape[1]):
            reached, came = (best[:, :, None] + self.change).max(1)
            best = reached + scores[:, step]
            back.append(came)
        path = [best.argmax(-1)]
        for came in reversed(back):
            path.append(came.gather(1, path[-1][:, None])[:, 0])
        return torch.stack(path[::-1], 1)


@pytest.mark.process
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="code for a CPU rounds so since torch 2.13")
def test_code_that_rounds_as_eager_finds_eagers_path(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, scores = BestPath().bfloat16(), torch.randn(300, 4, 4).bfloat16()
    said: list[str] = []
    trace(EagerModel(ExportSpec(model, (scores,))), TraceOptions(), torch.device("cpu"), said.append)
    advice = next(line for line in said if "of which rounding decides `0`" in line)
    found = re.search(r"--inductor-config (\w+)=True rounds each operator's result as eager does", advice)
    assert found is not None, advice
    package = compile_code(torch.export.export(model, (scores,)), tmp_path, **{found[1]: True})
    compiled: Any = torch._inductor.aoti_load_package(str(package))
    assert torch.equal(compiled(scores), model(scores))
