"""A linear layer whose result for one sample does not depend on the batch size."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from exportkit.arr_coc.ops.invariant_linear import invariant_linear

LinearForm = Literal["auto", "invariant", "per-sample", "folded"]
LINEARS: tuple[LinearForm, ...] = ("auto", "invariant", "per-sample", "folded")
_HALF = (torch.float16, torch.bfloat16)


class SampleLinear(nn.Linear):
    """`nn.Linear` over [B, M, in], which gives a sample the same bits in every batch, in eval mode.

    nn.Linear computes one product of B*M rows. A matrix library picks its kernel, and so the order of summation, by
    that number. Then an image may get other last bits in a batch of 8 than alone, and a near tie in a ranking may flip.

    - "invariant" computes `invariant_linear`, whose order of summation does not depend on the rows.
    - "per-sample" computes one product per sample, which has the same shape in every batch. From 16 rows on, this costs
      nothing measurable on the CPU. On a GPU it is slower than the others, and in float32 a batch of one sample may
      have other last bits.
    - "folded" computes the product of nn.Linear.
    - "auto" is "per-sample" on a CPU. On a GPU it is "invariant", and "folded" in half precision and under autocast,
      where this changed no bits in any comparison (docs/performance.md). If torch may round the factors of float32
      products to TF32, it is "per-sample", because only torch's products do that.

    Training folds.
    """

    def __init__(self, width: int, out: int, form: LinearForm = "auto") -> None:
        super().__init__(width, out)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        """[B, M, in] -> [B, M, out]."""
        return product(x, self.weight, self.bias, self.form, training=self.training)

    def product(self, x: Tensor) -> Tensor:
        """Computes [B, M, in] -> [B, M, out] without the bias."""
        return product(x, self.weight, form=self.form, training=self.training)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, form: LinearForm = "auto", *, training: bool = False
) -> Tensor:
    """Multiplies [B, M, in] by the transpose of a weight [out, in], as SampleLinear says.

    Training folds, because the gradient of a weight that B products share would need B copies of it.
    """
    if training:
        form = "folded"
    if form == "auto":
        form = form_of_auto(x.device.type, dtype_of_product(x))
    if form == "folded":
        return functional.linear(x, weight, bias)
    if form == "invariant":
        return invariant_linear(x, weight, bias)
    shared = weight.t().expand(x.shape[0], -1, -1)
    return torch.bmm(x, shared) if bias is None else torch.baddbmm(bias, x, shared)


def form_of_auto(device_type: str, dtype: torch.dtype) -> LinearForm:
    """Returns the form that "auto" stands for."""
    if device_type != "cuda":
        return "per-sample"
    if dtype in _HALF:
        return "folded"
    return "per-sample" if dtype == torch.float32 and _rounds_to_tf32() else "invariant"


def dtype_of_product(x: Tensor) -> torch.dtype:
    """Returns the dtype in which torch multiplies x, which is autocast's if that is on."""
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _rounds_to_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# What torch.compiler.assume_constant_result does, which imports the compiler first: that takes a second.
_rounds_to_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]
