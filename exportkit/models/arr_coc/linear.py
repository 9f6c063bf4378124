"""A linear layer whose result for one sample does not depend on the batch size."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

LinearForm = Literal["per-sample", "folded"]
LINEARS: tuple[LinearForm, ...] = ("per-sample", "folded")


class SampleLinear(nn.Linear):
    """`nn.Linear` over [B, M, in] with one matrix product per sample in eval mode.

    nn.Linear computes one product of B*M rows. A matrix library picks its kernel, and so the order of summation, by
    that number. Then an image gets other last bits in a batch of 8 than alone, and a near tie in a ranking may flip.
    One product per sample has the same shape in every batch. From 16 rows on, it costs nothing measurable on the CPU.
    On a GPU it does in large batches: `form` "folded" chooses the product of nn.Linear, and gives up equal bits.

    Training uses the single product, because the gradient of a weight shared by B products would need B copies of it.
    """

    def __init__(self, width: int, out: int, form: LinearForm = "per-sample") -> None:
        super().__init__(width, out)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        """[B, M, in] -> [B, M, out]."""
        if self._folded:
            return super().forward(x)
        return self.product(x) if self.bias is None else torch.baddbmm(self.bias, x, self._shared_weight(x))

    def product(self, x: Tensor) -> Tensor:
        """Computes [B, M, in] -> [B, M, out] without the bias."""
        return functional.linear(x, self.weight) if self._folded else torch.bmm(x, self._shared_weight(x))

    @property
    def _folded(self) -> bool:
        return self.training or self.form == "folded"

    def _shared_weight(self, x: Tensor) -> Tensor:
        return self.weight.t().expand(x.shape[0], -1, -1)
