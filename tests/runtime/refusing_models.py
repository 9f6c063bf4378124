"""Modules whose values eager refuses where they are out of range: in each way that compiled code meets them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import exportkit


class Lookups(nn.Module):
    """Every kind of index, division and assertion. A row is of one line, so that a refusal names it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.bag = nn.Embedding(10, 16), nn.EmbeddingBag(10, 8)
        self.table = nn.Buffer(torch.randn(10, 4))
        self.waves = nn.Buffer(torch.randn(10, 4, dtype=torch.complex64))  # left to eager's kernels

    def forward(
        self, ids: torch.Tensor, x: torch.Tensor, divisor: torch.Tensor, row: torch.Tensor, count: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        n = x.shape[0]
        torch._assert_async((x > -1e4).all(), "x must be above\n-10000 \U0001f600")
        chosen, picked = x[x[:, 0] > -100], x[x[:, 1] > -100]
        k = row.item()
        torch._check(k < n)
        torch._check(k >= 0)
        return {
            "embedding": self.words(ids),
            "wraps": self.table[ids - 5, ids % 4],
            "complex": torch.view_as_real(self.waves[ids]),
            "gather": x.gather(1, ids[:, None].expand(-1, 3)),
            "scatter_add": x.new_zeros(n, 10).scatter_add(1, ids[:, None], x[:, :1]),
            "index_add": x.new_zeros(10, 4).index_add(0, ids, x[:, :4]),
            "index_copy": x.new_zeros(10, 4).index_copy(0, ids[:1], x[:1, :4]),
            "index_put": x.new_zeros(10).index_put((ids,), x[:, 0], accumulate=True),
            "index_select": x.index_select(1, ids),
            "bag": self.bag(ids[:, None]),
            "product": x.new_ones(10).scatter_reduce(0, ids, x[:, 0], "prod"),
            "loss": nn.functional.cross_entropy(x[:, :10], ids, reduction="none"),
            "branch": torch.cond(x.sum() > 0, self.looked_up, self.negated, (ids, x)),
            "padded": nn.functional.pad(self.words(ids), (0, 0, 1, 0)),  # looked up where a mask holds
            "floor": ids // divisor,
            "trunc": torch.div(ids, divisor, rounding_mode="trunc"),
            "remainder": ids % divisor,
            "fmod": torch.fmod(ids, divisor),
            "of_chosen": nn.functional.pad(chosen[torch.zeros_like(ids)], (0, 0, 1, 0)),
            "of_picked": nn.functional.pad(picked[(picked[:, 1] * 0).long()], (0, 0, 1, 0))[:1],  # nothing of nothing
            "row": x[k],
            "new": x.new_zeros(count.item()),
            "rest": x[count.item() :].sum(0),  # of none, where the count is greater
        }  # fmt: skip

    def looked_up(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + x[:, :1]

    def negated(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return -x[:, :1] + 0 * self.words(ids)


def lookups() -> exportkit.ExportSpec:
    torch.manual_seed(1)
    return exportkit.ExportSpec(
        model=Lookups(),
        example_inputs=(
            torch.randint(0, 10, (6,)),
            torch.rand(6, 12),
            torch.randint(1, 5, (6,)),
            torch.tensor(1),
            torch.tensor(3),
        ),
        dynamic_shapes={"ids": {0: "n[4:64]"}, "x": {0: "n"}, "divisor": {0: "n"}},
    )


class LookupsOfTensors(Lookups):
    """Those that a CUDA graph can repeat: no number goes to the host."""

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]  # fewer inputs
        return {
            "embedding": self.words(ids),
            "wraps": self.table[ids - 5, ids % 4],
            "complex": torch.view_as_real(self.waves[ids]),
            "gather": x.gather(1, ids[:, None].expand(-1, 3)),
            "index_add": x.new_zeros(10, 4).index_add(0, ids, x[:, :4]),
            "index_put": x.new_zeros(10).index_put((ids,), x[:, 0], accumulate=True),
            "index_select": x.index_select(1, ids),
            "bag": self.bag(ids[:, None]),
            "loss": nn.functional.cross_entropy(x[:, :10], ids, reduction="none"),
        }


def lookups_of_tensors_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randperm(10)[:6], torch.rand(6, 12)


def lookups_of_tensors() -> exportkit.ExportSpec:
    return exportkit.ExportSpec(
        model=LookupsOfTensors(),
        example_inputs=lookups_of_tensors_inputs(),
        dynamic_shapes={"ids": {0: "n[4:64]"}, "x": {0: "n"}},
    )


class Attention(nn.Module):
    """What attention reads of its inputs: in a `score_mod`, a `mask_mod` and the blocks of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.arange(8.0))

    def forward(
        self, x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, counts: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scored = flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score + self.table[rows[i]])
        masked = BlockMask.from_kv_blocks(counts, blocks, mask_mod=lambda b, h, i, j: self.table[columns[j]] >= i % 8)
        return scored, flex_attention(x, x, x, block_mask=masked)


def attention_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "x": torch.randn(1, 2, 256, 16),
        "rows": torch.randint(0, 8, (256,)),
        "columns": torch.randint(0, 8, (256,)),
        "counts": torch.full((1, 1, 2), 2, dtype=torch.int32),
        "blocks": torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32),
    }


def attention() -> exportkit.ExportSpec:
    return exportkit.ExportSpec(model=Attention(), example_inputs=tuple(attention_inputs().values()))


class Words(nn.Module):
    """Rows that do not depend on one another, so that a server joins them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) * 2


def words() -> exportkit.ExportSpec:
    return exportkit.ExportSpec(
        model=Words(), example_inputs=(torch.tensor([[1, 2], [3, 4]]),), dynamic_shapes={"ids": {0: "batch[1:64]"}}
    )


class Notebook(nn.Module):
    """State that a token is written into."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 8)
        self.register_buffer("pages", torch.zeros(16, 8))

    def forward(self, token: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.pages.index_copy_(0, place, self.words(token))
        return self.pages.sum(0)


def notebook() -> exportkit.ExportSpec:
    return exportkit.ExportSpec(
        model=Notebook(), example_inputs=(torch.tensor([3]), torch.tensor([0])), state=("pages",)
    )
