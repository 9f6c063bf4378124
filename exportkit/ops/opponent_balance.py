"""Balancing: the weighted mean of the three ways of knowing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._autograd import register_no_second_derivative
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_floating, check_rank, check_same_size, shape_of
from exportkit.ops._reference import accumulated

_opponent_balance = operator("opponent_balance")
_opponent_balance_grad = operator("opponent_balance_grad")


def opponent_balance(
    entropy: Tensor, salience: Tensor, alignment: Tensor, weights: Tensor, invert_entropy: bool = False
) -> Tensor:
    """Weighted mean of three scores, clamped to [0, 1].

    clamp((w_c e + w_p s + w_f a) / (w_c + w_p + w_f), 0, 1) with e = entropy, or 1 - entropy if inverted. NaN scores
    stay NaN. The weights are data on the device, so their values are not checked: a sum of zero gives the formula's
    result, NaN or a clamped infinity.

    As in torch.clamp, gradients are zero where the mean lies outside [0, 1].

    Args:
        entropy: [B, N], floating; propositional.
        salience: [B, N], perspectival; of the dtype and device of `entropy`.
        alignment: [B, N], participatory; of the dtype and device of `entropy`.
        weights: [3] or [B, 3], (w_c, w_p, w_f); of the dtype and device of `entropy`. They need not sum to 1.
        invert_entropy: Whether low entropy means relevant.

    Returns:
        [B, N] in [0, 1].

    Raises:
        RuntimeError: An argument has a wrong rank, size, dtype or device.
    """
    return _opponent_balance(entropy, salience, alignment, weights, invert_entropy)


def opponent_balance_reference(
    entropy: Tensor, salience: Tensor, alignment: Tensor, weights: Tensor, invert_entropy: bool = False
) -> Tensor:
    """Computes `opponent_balance` in ATen."""
    e, s, a, w = (accumulated(t) for t in (entropy, salience, alignment, weights))
    e = 1 - e if invert_entropy else e
    w_c, w_p, w_f = w.unsqueeze(-1).unbind(-2)
    return ((w_c * e + w_p * s + w_f * a) / (w_c + w_p + w_f)).clamp(0, 1).to(entropy.dtype)


def opponent_balance_grad(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `opponent_balance`.

    With raw the weighted mean before the clamp and slope = grad / (w_c + w_p + w_f) if 0 <= raw <= 1, else 0:
    d e = slope w_c (negative if inverted), d w_c = sum slope (e - raw), and the same for the others. The sum is over N,
    and also over B if the weights are shared.

    Args:
        grad: [B, N], with the dtype and device of `entropy`.
        entropy: [B, N].
        salience: [B, N].
        alignment: [B, N].
        weights: [3] or [B, 3].
        invert_entropy: The same as in the forward call.
        need_entropy: Whether to compute the gradient of `entropy`. A gradient that is not computed has shape [0].
        need_salience: Whether to compute the gradient of `salience`.
        need_alignment: Whether to compute the gradient of `alignment`.
        need_weights: Whether to compute the gradient of `weights`.

    Returns:
        Gradients of entropy, salience, alignment and weights, each with its argument's shape.
    """
    return _opponent_balance_grad(
        grad, entropy, salience, alignment, weights, invert_entropy,
        need_entropy, need_salience, need_alignment, need_weights,
    )  # fmt: skip


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
    """Computes `opponent_balance_grad` in ATen."""
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


@torch.library.register_fake("arr_coc::opponent_balance")
def _opponent_balance_fake(
    entropy: Tensor, salience: Tensor, alignment: Tensor, weights: Tensor, invert_entropy: bool = False
) -> Tensor:
    op = "opponent_balance"
    check_rank(op, "entropy", entropy, 2, "[B, N]")
    check_floating(op, "entropy", entropy)
    for name, scores in (("salience", salience), ("alignment", alignment)):
        check_rank(op, name, scores, 2, "[B, N]")
        check_alike(op, "entropy", entropy, name, scores)
        check_same_size(op, "B", name, scores.shape[0], "entropy", entropy.shape[0])
        check_same_size(op, "N", name, scores.shape[1], "entropy", entropy.shape[1])
    check(
        weights.dim() in (1, 2) and weights.shape[-1] == 3,
        f"{op}: weights must be [3] or [B, 3], got shape {shape_of(weights)}",
    )
    check_alike(op, "entropy", entropy, "weights", weights)
    if weights.dim() == 2:
        check_same_size(op, "B", "weights", weights.shape[0], "entropy", entropy.shape[0])
    return entropy.new_empty(entropy.shape)


@torch.library.register_fake("arr_coc::opponent_balance_grad")
def _opponent_balance_grad_fake(
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
    op = "opponent_balance_grad"
    _opponent_balance_fake(entropy, salience, alignment, weights)
    check_rank(op, "grad", grad, 2, "[B, N]")
    check_alike(op, "entropy", entropy, "grad", grad)
    check_same_size(op, "B", "grad", grad.shape[0], "entropy", entropy.shape[0])
    check_same_size(op, "N", "grad", grad.shape[1], "entropy", entropy.shape[1])
    inputs = (entropy, salience, alignment, weights)
    needs = (need_entropy, need_salience, need_alignment, need_weights)
    return tuple(t.new_empty(t.shape if need else (0,)) for t, need in zip(inputs, needs))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.invert_entropy = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:4]
    arguments = (grad, *ctx.saved_tensors, ctx.invert_entropy, *needs)
    gradients = opponent_balance_grad(*arguments)
    return *(g if need else None for g, need in zip(gradients, needs)), None


torch.library.register_autograd("arr_coc::opponent_balance", _backward, setup_context=_setup_context)
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


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x, w = torch.rand(2, 5, device=device), torch.rand(3, device=device)
    yield Refusal("rank 1", (x[0], x, x, w), r"entropy must be \[B, N\], got shape \[5\]")
    yield Refusal("int64", (x.long(), x, x, w), "entropy must be float32.* got int64")
    yield Refusal("salience of rank 3", (x, x[None], x, w), r"salience must be \[B, N\], got shape \[1, 2, 5\]")
    yield Refusal("salience of other N", (x, x[:, :4], x, w), "salience has N = 4, entropy has N = 5")
    yield Refusal("alignment of other B", (x, x, x[:1], w), "alignment has B = 1, entropy has B = 2")
    yield Refusal("alignment of other dtype", (x, x, x.half(), w), "alignment is float16, entropy is float32")
    yield Refusal("two weights", (x, x, x, w[:2]), r"weights must be \[3\] or \[B, 3\], got shape \[2\]")
    yield Refusal("a scalar weight", (x, x, x, w[0]), r"weights must be \[3\] or \[B, 3\], got shape \[\]")
    yield Refusal("weights of other B", (x, x, x, w.expand(4, 3)), "weights has B = 4, entropy has B = 2")
    yield Refusal("weights of other dtype", (x, x, x, w.double()), "weights is float64, entropy is float32")


def _grad_refusals(device: torch.device) -> Iterable[Refusal]:
    x, w, flags = torch.rand(2, 5, device=device), torch.rand(3, device=device), (False, True, True, True, True)
    yield Refusal("grad of other B", (x[:1], x, x, x, w, *flags), "grad has B = 1, entropy has B = 2")
    yield Refusal("grad of other N", (x[:, :1], x, x, x, w, *flags), "grad has N = 1, entropy has N = 5")
    yield Refusal("grad of other dtype", (x.double(), x, x, x, w, *flags), "grad is float64, entropy is float32")
    yield Refusal("two weights", (x, x, x, x, w[:2], *flags), r"weights must be \[3\] or \[B, 3\]")


_BY_POSITION = {0: "B", 1: "N"}
SPEC = OpSpec(
    name="opponent_balance",
    wrapper=opponent_balance,
    reference=opponent_balance_reference,
    samples=_samples,
    refusals=_refusals,
    differentiable=("entropy", "salience", "alignment", "weights"),
    dynamic={"entropy": _BY_POSITION, "salience": _BY_POSITION, "alignment": _BY_POSITION},
    autocast="float32",
)
GRAD_SPEC = OpSpec(
    name="opponent_balance_grad",
    wrapper=opponent_balance_grad,
    reference=opponent_balance_grad_reference,
    samples=_grad_samples,
    refusals=_grad_refusals,
    dynamic={
        "grad": _BY_POSITION,
        "entropy": _BY_POSITION,
        "salience": _BY_POSITION,
        "alignment": _BY_POSITION,
        "weights": {0: "B"},
    },
)
