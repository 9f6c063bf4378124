"""The three scores and their weighted mean in one operator for inference, which reads the features once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from exportkit.arr_coc.ops._autograd import FOR_INFERENCE, register_no_derivative
from exportkit.arr_coc.ops._operator import ArrCocSpec, Layout, Refusal, Sample, normals, operator_like
from exportkit.arr_coc.ops._reference import accumulated, unit
from exportkit.arr_coc.ops._salience import CONTRAST_HALF, EDGE_HALF, neighbour_distances, normalised
from exportkit.arr_coc.ops.compute_entropy import LAYOUT as ENTROPY
from exportkit.arr_coc.ops.compute_entropy import compute_entropy_reference
from exportkit.arr_coc.ops.compute_salience import check_salience_weights
from exportkit.arr_coc.ops.opponent_balance import opponent_balance_reference
from exportkit.arr_coc.ops.query_alignment import LAYOUT as ALIGNMENT
from exportkit.arr_coc.ops.query_alignment import query_alignment_reference


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
    """Computes each patch's relevance from its entropy, salience and alignment.

    opponent_balance(compute_entropy(features, temperature), salience, query_alignment(features, query, mask), weights,
    invert_entropy), where salience is compute_salience's w_E E + w_C C + w_F F for given mean edge strengths and mean
    colours. In half precision the three scores are not rounded before they are balanced.

    It is for inference and has no gradient. Train with these four operators instead.

    Args:
        features: One row for each patch, row by row of the grid.
        query: One row, or one for each of T tokens.
        colours: The patches' mean CIE LAB.
        edges: The patches' mean gradient magnitude, at least 0.
        weights: The weights of entropy, salience and alignment, the same for all samples or by sample. They need not
            sum to 1.
        mask: True where a token counts. Only with a query of tokens.
        salience_weights: w_E, w_C, w_F: finite, at least 0, with a sum above 0. With w_F = 0 the features are always
            read only once, because their mean is not needed.
        temperature: The temperature of the entropy's softmax.
        invert_entropy: Whether low entropy means relevant.

    Returns:
        Values in [0, 1].
    """
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


relevance_scores = operator_like(relevance_scores_reference)


_PARTS = "compute_entropy, compute_salience, query_alignment and opponent_balance"
register_no_derivative("relevance_scores", FOR_INFERENCE + _PARTS)


def _inputs(
    device: torch.device, dtype: torch.dtype, batch: int, rows: int, columns: int, width: int, tokens: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draws arguments; `tokens` = 0 gives a query [B, D] and weights [3], otherwise [B, T, D] and [B, 3]."""
    normal = normals(device, dtype)
    return (
        normal(batch, rows * columns, width) + 0.5,
        normal(batch, *([tokens] if tokens else []), width),
        normal(batch, 3, rows, columns, scale=20),
        normal(batch, 1, rows, columns, scale=0.1).abs(),
        torch.rand(*([batch] if tokens else []), 3, device=device).to(dtype) + 0.1,
    )


def _samples(device: torch.device, dtype: torch.dtype) -> Iterable[Sample]:
    calls = [(2, 2, 3, 8), (3, 4, 2, 8), (1, 3, 3, 5), (5, 5, 7, 33), (0, 2, 2, 4), (2, 0, 2, 4), (2, 1, 1, 1)]
    calls += [(2, 1, 6, 264), (1, 20, 13, 40), (2, 3, 2, 1024), (1, 2, 5, 1030), (2, 9, 5, 2304)]
    for sizes in calls:
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
    yield Refusal(
        "two salience weights", (x, q, c, e, w, None, (1.0, 2.0)), "salience_weights must be 3 numbers, got 2"
    )
    for bad in [(0.0, 0.0, 0.0), (1.0, -0.5, 1.0), (math.nan, 1.0, 1.0), (1.0, math.inf, 1.0)]:
        listed = ", ".join(f"{weight:g}" for weight in bad)
        yield Refusal(f"salience weights {bad}", (x, q, c, e, w, None, bad), rf"sum > 0, got \[{listed}\]")


SPEC = ArrCocSpec(
    wrapper=relevance_scores,
    reference=relevance_scores_reference,
    layout=Layout(
        after={"compute_entropy": ENTROPY, "query_alignment": ALIGNMENT},
        inputs={"colours": "B 3 gh gw", "edges": "B 1 gh gw", "weights": "3 | B 3"},
        outputs=["B N"],
        derived={"N": ("the grid of patches", "gh * gw")},
        further=lambda op, salience_weights, **_: check_salience_weights(op, "salience_weights", salience_weights),
    ),
    static=("D",),
    samples=_samples,
    more_refusals=_refusals,
    autocast="float32",
)
