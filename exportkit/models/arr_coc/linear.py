"""A linear layer whose result for one sample does not depend on the batch size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class SampleLinear(nn.Linear):
    """`nn.Linear` over [B, M, in] with one matrix product per sample in eval mode.

    nn.Linear computes one product of B*M rows. A matrix library picks its kernel, and so the order of summation, by
    that number. Then an image gets other last bits in a batch of 8 than alone, and a near tie in a ranking may flip.
    One product per sample has the same shape in every batch. From 16 rows on, it costs nothing measurable on the CPU.

    Training uses the single product, because the gradient of a weight shared by B products would need B copies of it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, M, in] -> [B, M, out]."""
        if self.training:
            return super().forward(x)
        return self.product(x) if self.bias is None else torch.baddbmm(self.bias, x, self._shared_weight(x))

    def product(self, x: Tensor) -> Tensor:
        """Computes [B, M, in] -> [B, M, out] without the bias."""
        return functional.linear(x, self.weight) if self.training else torch.bmm(x, self._shared_weight(x))

    def _shared_weight(self, x: Tensor) -> Tensor:
        return self.weight.t().expand(x.shape[0], -1, -1)
