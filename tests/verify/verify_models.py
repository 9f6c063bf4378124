"""A model that the eager process of test_verify.py makes."""

from __future__ import annotations

import torch

STATE = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of a model without any


class Refusing(torch.nn.Module):
    """As the one of the artifact, but not for a single row."""

    def forward(self, x):
        if x.shape[0] < 2:
            raise ValueError(f"at least 2 rows, got {x.shape[0]}")
        return {"y": x * 2, "n": torch.ones_like(x, dtype=torch.int64).sum(1)}
