"""Distributions are exported, though torch reads their arguments to check them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributions
from torch.torch_version import TorchVersion

from exportkit import ExportSpec
from exportkit.errors import ExportError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.trace.trace import trace


class Policy(torch.nn.Module):
    """A policy's densities: of a bounded action, of one of three, and of what several outcomes are worth."""

    def forward(self, mean: Tensor, width: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        normal = distributions.Normal(mean, width.exp())
        bounded = distributions.TransformedDistribution(normal, [distributions.TanhTransform(cache_size=1)])
        chosen = distributions.Categorical(logits=logits)
        mixture = distributions.MixtureSameFamily(chosen, distributions.Normal(logits, 1.0))
        together = distributions.Independent(normal, 1)
        other = distributions.Normal(torch.zeros_like(mean), 1.0)
        return (
            bounded.log_prob(mean.tanh() * 0.9),
            chosen.log_prob(logits.argmax(-1)) + chosen.entropy(),
            mixture.mean,
            together.log_prob(mean + 1),
            distributions.kl_divergence(normal, other),
            distributions.Beta(width.exp(), 2.0).mean,
            distributions.MultivariateNormal(mean, torch.eye(2)).log_prob(mean * 2),
        )


def test_densities_of_any_batch_are_torchs() -> None:
    sizes = {"mean": {0: "batch[1:8]"}, "width": {0: "batch"}, "logits": {0: "batch"}}
    spec = ExportSpec(Policy(), (torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 4)), dynamic_shapes=sizes)
    (method,) = trace(EagerModel(spec), TraceOptions(), torch.device("cpu"), lambda _: None).methods
    inputs = torch.randn(8, 2), torch.randn(8, 2), torch.randn(8, 4)
    torch.testing.assert_close(method.program.module()(*inputs), spec.model(*inputs))


class Checked(torch.nn.Module):
    def forward(self, mean: Tensor, width: Tensor) -> Tensor:
        return distributions.Normal(mean, width, validate_args=True).log_prob(mean)


def test_a_check_that_the_model_asks_for_is_named_or_kept() -> None:
    model, inputs = EagerModel(ExportSpec(Checked(), (torch.randn(3), torch.ones(3)))), (torch.randn(3), torch.ones(3))
    if TorchVersion(torch.__version__) < "2.15":
        with pytest.raises(ExportError, match=r"branches on the value of a tensor at test_distributions.py:") as caught:
            trace(model, TraceOptions(), torch.device("cpu"), lambda _: None)
        assert caught.value.hint.startswith("Leave validate_args=True out")
        return
    (method,) = trace(model, TraceOptions(), torch.device("cpu"), lambda _: None).methods
    torch.testing.assert_close(method.program.module()(*inputs), Checked()(*inputs))
    with pytest.raises(RuntimeError, match="to satisfy its distribution constraint"):
        method.program.module()(inputs[0], -inputs[1])
