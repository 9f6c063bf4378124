"""A linear layer whose answer for one sample does not depend on how many others are in the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class SampleLinear(nn.Linear):
    """`nn.Linear` over [B, M, in], one matrix product a sample when evaluating.

    nn.Linear folds batch and rows into one product of B*M rows, and a matrix library picks its kernel, and with it the
    order of summation, by that number: the same image then gets other last bits in a batch of 8 than alone, and a
    near tie in a ranking flips. One product a sample has the same shape in every batch. It costs nothing measurable
    on the CPU from 16 rows on.

    In training the folded product is used: the gradient of a weight shared by B products would need B copies of it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, M, in] -> [B, M, out]."""
        if self.training:
            return super().forward(x)
        return self.product(x) if self.bias is None else torch.baddbmm(self.bias, x, self._shared_weight(x))

    def product(self, x: Tensor) -> Tensor:
        """[B, M, in] -> [B, M, out], without the bias."""
        return functional.linear(x, self.weight) if self.training else torch.bmm(x, self._shared_weight(x))

    def _shared_weight(self, x: Tensor) -> Tensor:
        return self.weight.t().expand(x.shape[0], -1, -1)
