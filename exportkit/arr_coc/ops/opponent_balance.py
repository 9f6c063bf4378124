"""Fusion: the weighted mean of the three scores."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import register_gradient, register_no_second_derivative
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Sample, operator_like
from exportkit.arr_coc.ops._reference import accumulated, at_least, at_most


def opponent_balance_reference(
    entropy: Tensor, salience: Tensor, alignment: Tensor, weights: Tensor, invert_entropy: bool = False
) -> Tensor:
    """Weighted mean of three scores, clamped to [0, 1].

    clamp((w_c e + w_p s + w_f a) / (w_c + w_p + w_f), 0, 1) with e = entropy, or 1 - entropy if inverted. NaN scores
    stay NaN. The weights are data on the device, so their values are not checked: a sum of zero gives the formula's
    result, NaN or a clamped infinity.

    Gradients are zero only where the mean lies outside [0, 1].

    Args:
        entropy: Its weight is w_c.
        salience: Its weight is w_p.
        alignment: Its weight is w_f.
        weights: w_c, w_p, w_f, the same for all samples or by sample. They need not sum to 1.
        invert_entropy: Whether low entropy means relevant.

    Returns:
        Values in [0, 1].
    """
    e, s, a, w = (accumulated(t) for t in (entropy, salience, alignment, weights))
    e = 1 - e if invert_entropy else e
    w_c, w_p, w_f = w.unsqueeze(-1).unbind(-2)
    mean = (w_c * e + w_p * s + w_f * a) / (w_c + w_p + w_f)
    return at_most(at_least(mean, 0), 1).to(entropy.dtype)


opponent_balance = operator_like(opponent_balance_reference)


def opponent_balance_grad_reference(
    grad: Tensor,
    entropy: Tensor,
    salience: Tensor,
    alignment: Tensor,
    weights: Tensor,
    invert_entropy: bool,
    need_entropy: bool,
    need_salience: bool,
    need_alignment: bool,
    need_weights: bool,
) -> tuple[Tensor, ...]:
    """Gradients of `opponent_balance`.

    With raw the weighted mean before the clamp and slope = grad / (w_c + w_p + w_f) if 0 <= raw <= 1, else 0:
    d e = slope w_c (negative if inverted), d w_c = sum slope (e - raw), and the same for the others. The sum is over N,
    and also over B if the weights are shared.
    """
    g, e, s, a, w = (accumulated(t) for t in (grad, entropy, salience, alignment, weights))
    e = 1 - e if invert_entropy else e
    w_c, w_p, w_f = w.unsqueeze(-1).unbind(-2)
    total = w_c + w_p + w_f
    raw = (w_c * e + w_p * s + w_f * a) / total
    slope = torch.where((raw >= 0) & (raw <= 1), g, 0) / total
    of_weights = torch.stack([(slope * (score - raw)).sum(-1) for score in (e, s, a)], -1)
    of_weights = of_weights if weights.dim() == 2 else of_weights.sum(0)
    gradients = (slope * (-w_c if invert_entropy else w_c), slope * w_p, slope * w_f, of_weights)
    needs = (need_entropy, need_salience, need_alignment, need_weights)
    return tuple(g.to(entropy.dtype) if need else entropy.new_empty(0) for g, need in zip(gradients, needs))


opponent_balance_grad = operator_like(opponent_balance_grad_reference)

register_gradient("opponent_balance", opponent_balance_grad)
register_no_second_derivative("opponent_balance_grad")


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    def scores(*shape: int) -> tuple[Tensor, ...]:
        return tuple(torch.rand(shape, device=device).mul(0.8).add(0.1).to(dtype) for _ in range(3))

    def weights(*values: float) -> Tensor:
        return torch.tensor(values, device=device, dtype=dtype)

    for shape in [(2, 7), (1, 5), (5, 33), (0, 4), (2, 0), (2, 4097)]:
        yield Sample(f"scores {list(shape)}", (*scores(*shape), weights(0.3, 0.4, 0.3)))
    for shape in [(2, 6), (1, 1), (5, 31), (0, 2), (3, 2049)]:
        each = (torch.rand(shape[0], 3, device=device) + 0.1).to(dtype)
        yield Sample(f"scores {list(shape)}, weights by sample, inverted", (*scores(*shape), each, True))
    yield Sample("weights that sum to 6", (*scores(2, 5), weights(1, 2, 3)))
    yield Sample("clamped at both ends", (*scores(2, 40), weights(3, -4, 2)))
    holes = [s.index_fill(1, torch.tensor([i], device=device), torch.nan) for i, s in enumerate(scores(2, 5))]
    yield Sample("NaN stays NaN", (*holes, weights(0.3, 0.4, 0.3)))


def _grad_samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    samples = list(_samples(device, dtype))
    samples = [s for s in samples if len(s.args) == 5] + [s for s in samples if len(s.args) == 4]
    for index, sample in enumerate(samples):
        grad = torch.randn(sample.args[0].shape, device=device, dtype=dtype)
        needs = (True,) * 4 if index < 8 else tuple(index % 4 != i for i in range(4))
        yield Sample(sample.label, (grad, *sample.args[:4], len(sample.args) == 5, *needs))


LAYOUT = Layout(inputs={"entropy": "B N", "salience": "B N", "alignment": "B N", "weights": "3 | B 3"}, outputs=["B N"])
SPEC = ArrCocSpec(
    wrapper=opponent_balance,
    reference=opponent_balance_reference,
    layout=LAYOUT,
    samples=_samples,
    differentiable=("entropy", "salience", "alignment", "weights"),
    autocast="float32",
)
GRAD_SPEC = ArrCocSpec(
    wrapper=opponent_balance_grad,
    reference=opponent_balance_grad_reference,
    layout=Layout(
        after={"opponent_balance": LAYOUT},
        inputs={"grad": "B N"},
        outputs=[f"like {name} if need_{name}" for name in LAYOUT.inputs],
    ),
    samples=_grad_samples,
)
