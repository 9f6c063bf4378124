"""The three ways of knowing and their balance in one operator for inference, which reads the features once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from exportkit.contract.operator_spec import OpSpec, Refusal, Sample
from exportkit.ops._autograd import register_no_derivative
from exportkit.ops._call import operator
from exportkit.ops._checks import check, check_alike, check_same_size, shape_of
from exportkit.ops._reference import accumulated, unit
from exportkit.ops._salience import CONTRAST_HALF, EDGE_HALF, neighbour_distances, normalised
from exportkit.ops.compute_entropy import _compute_entropy_fake, compute_entropy_reference
from exportkit.ops.compute_salience import check_salience_weights
from exportkit.ops.opponent_balance import opponent_balance_reference
from exportkit.ops.query_alignment import _query_alignment_fake, query_alignment_reference

_relevance_scores = operator("relevance_scores")


def relevance_scores(
    features: Tensor,
    query: Tensor,
    colours: Tensor,
    edges: Tensor,
    weights: Tensor,
    mask: Tensor | None = None,
    salience_weights: Sequence[float] = (0.5, 0.25, 0.25),
    temperature: float = 1.0,
    invert_entropy: bool = False,
) -> Tensor:
    """Computes each patch's relevance from its entropy, salience and alignment.

    opponent_balance(compute_entropy(features, temperature), salience, query_alignment(features, query, mask), weights,
    invert_entropy), where salience is compute_salience's w_E E + w_C C + w_F F for given mean edge strengths and mean
    colours. In half precision the three scores are not rounded before they are balanced.

    It is for inference and has no gradient. Train with these four operators instead.

    Args:
        features: [B, N, D], floating, N = gh gw patches, row by row.
        query: [B, D] or [B, T, D] with T >= 1, with the dtype and device of `features`.
        colours: [B, 3, gh, gw], the patches' mean CIE LAB, with the same dtype and device.
        edges: [B, 1, gh, gw], the patches' mean gradient magnitude, at least 0, with the same dtype and device.
        weights: [3] or [B, 3], the weights of entropy, salience and alignment, with the same dtype and device. They
            need not sum to 1.
        mask: [B, T], bool, true where a token counts; on the device of `features`. Only with a query [B, T, D].
        salience_weights: w_E, w_C, w_F: finite, at least 0, with a sum above 0. With w_F = 0 the features are always
            read only once, because their mean is not needed.
        temperature: The temperature of the entropy's softmax, above 0.
        invert_entropy: Whether low entropy means relevant.

    Returns:
        [B, N] in [0, 1], in the dtype of `features`.

    Raises:
        RuntimeError: An argument has a wrong rank, size, dtype or device, D = 0, T = 0, a mask comes with a query
            [B, D], temperature <= 0, the salience weights are out of range, or a gradient is requested.
    """
    return _relevance_scores(
        features,
        query,
        colours,
        edges,
        weights,
        mask,
        salience_weights,
        temperature,
        invert_entropy,
    )


def relevance_scores_reference(
    features: Tensor,
    query: Tensor,
    colours: Tensor,
    edges: Tensor,
    weights: Tensor,
    mask: Tensor | None = None,
    salience_weights: Sequence[float] = (0.5, 0.25, 0.25),
    temperature: float = 1.0,
    invert_entropy: bool = False,
) -> Tensor:
    """`relevance_scores` in ATen: the composition."""
    x, q, c, m, w = (accumulated(t) for t in (features, query, colours, edges, weights))
    w_e, w_c, w_f = normalised(salience_weights)
    m = m.flatten(1)
    distances, neighbours = neighbour_distances(c)
    d = (sum(distances) / neighbours.clamp(min=1)).flatten(1)
    salience = w_e * m / (m + EDGE_HALF) + w_c * d / (d + CONTRAST_HALF)
    if w_f > 0:
        salience = salience + w_f * (1 - (unit(x) * unit(x.mean(1, keepdim=True))).sum(-1)) / 2
    entropy, alignment = compute_entropy_reference(x, temperature), query_alignment_reference(x, q, mask)
    return opponent_balance_reference(entropy, salience, alignment, w, invert_entropy).to(features.dtype)


@torch.library.register_fake("arr_coc::relevance_scores")
def _relevance_scores_fake(
    features: Tensor,
    query: Tensor,
    colours: Tensor,
    edges: Tensor,
    weights: Tensor,
    mask: Tensor | None = None,
    salience_weights: Sequence[float] = (0.5, 0.25, 0.25),
    temperature: float = 1.0,
    invert_entropy: bool = False,
) -> Tensor:
    op = "relevance_scores"
    _compute_entropy_fake(features, temperature)
    _query_alignment_fake(features, query, mask)
    for name, means, channels in (("colours", colours, 3), ("edges", edges, 1)):
        check(
            means.dim() == 4 and means.shape[1] == channels,
            f"{op}: {name} must be [B, {channels}, gh, gw], got shape {shape_of(means)}",
        )
        check_alike(op, "features", features, name, means)
        check_same_size(op, "B", name, means.shape[0], "features", features.shape[0])
    check_same_size(op, "gh", "edges", edges.shape[2], "colours", colours.shape[2])
    check_same_size(op, "gw", "edges", edges.shape[3], "colours", colours.shape[3])
    patches = colours.shape[2] * colours.shape[3]
    check_same_size(op, "N", "features", features.shape[1], "the grid of patches", patches)
    check(
        weights.dim() in (1, 2) and weights.shape[-1] == 3,
        f"{op}: weights must be [3] or [B, 3], got shape {shape_of(weights)}",
    )
    check_alike(op, "features", features, "weights", weights)
    if weights.dim() == 2:
        check_same_size(op, "B", "weights", weights.shape[0], "features", features.shape[0])
    check_salience_weights(op, "salience_weights", salience_weights)
    return features.new_empty(features.shape[:2])


register_no_derivative("relevance_scores", "compute_entropy, compute_salience, query_alignment and opponent_balance")


def _inputs(
    device: torch.device, dtype: torch.dtype, batch: int, rows: int, columns: int, width: int, tokens: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draws arguments; `tokens` = 0 gives a query [B, D] and weights [3], otherwise [B, T, D] and [B, 3]."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)

    return (
        normal(batch, rows * columns, width) + 0.5,
        normal(batch, *([tokens] if tokens else []), width),
        normal(batch, 3, rows, columns, scale=20),
        normal(batch, 1, rows, columns, scale=0.1).abs(),
        torch.rand(*([batch] if tokens else []), 3, device=device).to(dtype) + 0.1,
    )


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    for sizes in [
        (2, 2, 3, 8),
        (3, 4, 2, 8),
        (1, 3, 3, 5),
        (5, 5, 7, 33),
        (0, 2, 2, 4),
        (2, 0, 2, 4),
        (2, 1, 1, 1),
        (2, 1, 6, 264),
        (1, 20, 13, 40),
        (2, 3, 2, 1024),
        (1, 2, 5, 1030),
        (2, 9, 5, 2304),
    ]:
        yield Sample("B, gh, gw, D = {}, {}, {}, {}".format(*sizes), _inputs(device, dtype, *sizes))
    for tokens, sizes in [(4, (2, 2, 3, 8)), (17, (1, 4, 5, 65)), (2, (5, 3, 3, 520))]:
        mask = torch.rand(sizes[0], tokens, device=device) < 0.6
        arguments = _inputs(device, dtype, *sizes, tokens)
        yield Sample("B, gh, gw, D = {}, {}, {}, {}".format(*sizes) + f", T = {tokens}", arguments)
        yield Sample("B, gh, gw, D = {}, {}, {}, {}".format(*sizes) + f", T = {tokens}, masked", (*arguments, mask))
    for weights in [(1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.0, 0.0, 0.5), (3.0, 4.0, 5.0)]:
        for options in [(1.0, False), (0.1, True)]:
            arguments = _inputs(device, dtype, 2, 3, 5, 24)
            yield Sample(f"salience weights {weights}, {options}", (*arguments, None, weights, *options))
    for weights in [(0.5, 0.5, 0.0), (0.5, 0.25, 0.25)]:
        features, query, colours, *others = _inputs(device, dtype, 2, 3, 3, 8)
        colours[0, 1, 0, 0] = features[1, 3, 2] = torch.nan
        features[0, 4, 1] = -torch.inf
        yield Sample("NaN and an infinity", (features, query, colours, *others, None, weights))


def _refusals(device: torch.device) -> Iterable[Refusal]:
    x, q, c, e, w = _inputs(device, torch.float32, 2, 2, 3, 8, tokens=4)
    yield Refusal("rank 2", (x[0], q, c, e, w), r"features must be \[B, N, D\], got shape \[6, 8\]")
    yield Refusal("int64", (x.long(), q, c, e, w), "features must be float32.* got int64")
    yield Refusal("query of other B", (x, q[:1], c, e, w), "query has B = 1, features has B = 2")
    yield Refusal("mask of floats", (x, q, c, e, w, q[..., 0]), "mask must be bool, got float32")
    yield Refusal("two channels", (x, q, c[:, :2], e, w), r"colours must be \[B, 3, gh, gw\], got shape \[2, 2, 2, 3\]")
    yield Refusal("colours of other dtype", (x, q, c.half(), e, w), "colours is float16, features is float32")
    yield Refusal("colours of other B", (x, q, c[:1], e, w), "colours has B = 1, features has B = 2")
    yield Refusal("edges of rank 3", (x, q, c, e[:, 0], w), r"edges must be \[B, 1, gh, gw\], got shape \[2, 2, 3\]")
    yield Refusal("edges of other gh", (x, q, c, e[:, :, :1], w), "edges has gh = 1, colours has gh = 2")
    yield Refusal("edges of other gw", (x, q, c, e[..., :1], w), "edges has gw = 1, colours has gw = 3")
    yield Refusal("other N", (x[:, :5], q, c, e, w), "features has N = 5, the grid of patches has N = 6")
    yield Refusal("two weights", (x, q, c, e, w[:, :2]), r"weights must be \[3\] or \[B, 3\], got shape \[2, 2\]")
    yield Refusal("weights of other B", (x, q, c, e, w[:1]), "weights has B = 1, features has B = 2")
    yield Refusal("temperature 0", (x, q, c, e, w, None, (1.0, 1.0, 1.0), 0.0), "temperature must be > 0, got 0")
    yield Refusal(
        "two salience weights", (x, q, c, e, w, None, (1.0, 2.0)), "salience_weights must be 3 numbers, got 2"
    )
    for bad in [(0.0, 0.0, 0.0), (1.0, -0.5, 1.0), (math.nan, 1.0, 1.0), (1.0, math.inf, 1.0)]:
        listed = ", ".join(f"{weight:g}" for weight in bad)
        yield Refusal(f"salience weights {bad}", (x, q, c, e, w, None, bad), rf"sum > 0, got \[{listed}\]")


_GRID = {0: "B", 2: "gh", 3: "gw"}
SPEC = OpSpec(
    name="relevance_scores",
    wrapper=relevance_scores,
    reference=relevance_scores_reference,
    samples=_samples,
    refusals=_refusals,
    dynamic={"features": {0: "B", 1: "N"}, "query": {0: "B"}, "colours": _GRID, "edges": _GRID},
    autocast="float32",
)
