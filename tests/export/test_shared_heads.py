"""Attention of one query over shared keys on a CPU: what heads that share become, and that compiled code has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import exportkit
from exportkit import ExportSpec
from exportkit.export.artifact import export_aoti
from exportkit.export.compile.shared_heads import heads_as_queries
from exportkit.export.export_options import TraceOptions

BATCH, HEADS, SHARED, LENGTH, WIDTH = 3, 6, 2, 33, 16
HALVES = (torch.float16, torch.bfloat16)
# What is added to the scores, of every form that torch takes. The last key is never seen.
MASKS = [(), (1, LENGTH), (1, 1, 1, LENGTH), (BATCH, 1, 1, LENGTH), (1, HEADS, 1, LENGTH), (BATCH, HEADS, 1, LENGTH)]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def attention_inputs(dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = BATCH) -> list[Tensor]:
    keys = (batch, SHARED, LENGTH, WIDTH)
    return tensors((batch, HEADS, 1, WIDTH), keys, keys, dtype=dtype, seed=seed)


def masked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    if not shape:
        return None
    (mask,) = tensors(shape, dtype=dtype, seed=1)
    mask[..., -1] = -torch.inf
    return mask


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_it_is_attention_of_every_head_with_its_keys(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    inputs, mask = attention_inputs(dtype), masked(shape, dtype)
    attended, sums = heads_as_queries(*inputs, attn_mask=mask, scale=scale)
    query, key, value = (each.double() for each in inputs)
    key, value = (each.repeat_interleave(HEADS // SHARED, dim=1) for each in (key, value))
    scores = query @ key.mT * (scale or WIDTH**-0.5) + (0 if mask is None else mask.double())
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(attended.double(), scores.softmax(-1) @ value, rtol=8 * unit, atol=8 * unit)
    torch.testing.assert_close(sums.double(), scores.logsumexp(-1), rtol=8 * unit, atol=8 * unit)


def test_other_attention_stays_as_it_is() -> None:
    query, key, value = attention_inputs()
    assert heads_as_queries(query, query, query) is NotImplemented
    assert heads_as_queries(query.expand(-1, -1, 2, -1), key, value) is NotImplemented
    assert heads_as_queries(query, key, value, is_causal=True) is NotImplemented


class Attending(torch.nn.Module):
    """Attention with shared keys over a mask of bool, of one query and of two."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        def attended(queries: Tensor) -> Tensor:
            return scaled_dot_product_attention(queries, key, value, seen[:, None, None], enable_gqa=True)

        return attended(query), attended(torch.cat([query, -query], dim=2))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shared") / "attention.pt2"
    inputs = (*attention_inputs(), torch.rand(BATCH, LENGTH) > 0.5)
    shapes = {name: {0: "batch[1:8]"} for name in ("query", "key", "value", "seen")}
    export_aoti(ExportSpec(Attending(), inputs, dynamic_shapes=shapes), out, TraceOptions("cpu"))
    return out


def test_compiled_code_has_it_for_each_batch(exported: Path) -> None:
    with exportkit.load(exported, "cpu") as loaded:
        for batch in (1, 2, 8):
            inputs, seen = attention_inputs(seed=batch, batch=batch), torch.rand(batch, LENGTH) > 0.5
            answers, wide = loaded(*inputs, seen), Attending()(*(each.double() for each in inputs), seen)
            for answer, expected in zip(answers, wide):
                torch.testing.assert_close(answer.double(), expected, rtol=1e-5, atol=1e-6)
            added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            assert torch.equal(answers[0], heads_as_queries(*inputs, attn_mask=added[:, None, None])[0])
            assert not torch.equal(answers[0], Attending()(*inputs, seen)[0])  # ATen's kernel rounds otherwise
