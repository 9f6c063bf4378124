"""torch.cov and torch.corrcoef are exported, of any sizes: torch's own read a tensor to know whether to warn."""

from __future__ import annotations

import torch
from torch import Tensor

from exportkit import ExportSpec
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.tracing.trace import trace


class Covariances(torch.nn.Module):
    def forward(self, x: Tensor, times: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.cov(x),
            x.t().cov(correction=0),
            torch.corrcoef(x),
            torch.corrcoef(torch.complex(x, x.flip(0))),
            x[1].corrcoef(),
            torch.cov(x[0]),
            torch.cov(x, fweights=times),
            torch.cov(x, aweights=weights),
            torch.cov(x, correction=2, fweights=times, aweights=weights),
            torch.cov(torch.complex(x, x.flip(0) * 2)),
            torch.cov(times),
        )


def test_covariances_of_any_sizes_are_torchs() -> None:
    spec = ExportSpec(
        Covariances(),
        (torch.randn(3, 9), torch.randint(1, 4, (9,)), torch.rand(9) + 0.1),
        dynamic_shapes={
            "x": {0: "variables[2:20]", 1: "samples[3:50]"},
            "times": {0: "samples"},
            "weights": {0: "samples"},
        },
    )
    (method,) = trace(EagerModel(spec), TraceOptions(), torch.device("cpu"), lambda _: None).methods
    assert {d.name: (d.min, d.max) for d in method.call.dimensions} == {"variables": (2, 20), "samples": (3, 50)}
    for variables, samples in ((2, 3), (20, 50)):
        inputs = torch.randn(variables, samples), torch.randint(1, 4, (samples,)), torch.rand(samples) + 0.1
        torch.testing.assert_close(method.program.module()(*inputs), spec.model(*inputs))
    called = {node.target for node in method.program.graph.nodes}
    assert not called & {torch.ops.aten.cov.default, torch.ops.aten.corrcoef.default}, "the compiler would stop there"
