"""Models that the eager process of test_verify.py makes."""

from __future__ import annotations

import torch

from exportkit.spec import ExportSpec

STATE = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of a model without any


class Affine(torch.nn.Module):
    """As the one of the artifact."""

    factor = 2
    least = 1

    def forward(self, x):
        if x.shape[0] < self.least:
            raise ValueError(f"at least {self.least} rows, got {x.shape[0]}")
        return {"y": x * self.factor, "n": torch.ones_like(x, dtype=torch.int64).sum(1)}


def _spec(**attributes):
    model = Affine()
    vars(model).update(attributes)
    return ExportSpec(model=model, example_inputs=(torch.rand(4, 3),), dynamic_shapes={"x": {0: "rows[1:8]"}})


def affine():
    return _spec()


def tripling():
    return _spec(factor=3)


def refusing():
    return _spec(least=2)
