"""Models that use rows whose number depends on data, in many ways. The operators are in kept_rows.cpp."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from exportkit import ExportSpec


@torch.library.register_fake("kept_rows::keep")
def _(rows: Tensor, scores: Tensor, distance: float) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # the name is deprecated, and torchvision uses it
        return rows.new_empty(torch.library.get_ctx().create_unbacked_symint(), dtype=torch.int64)


@torch.library.register_fake("kept_rows::keep_two")
def _(rows: Tensor, scores: Tensor, distance: float) -> Tensor:
    return rows.new_empty(torch.library.get_ctx().new_dynamic_size(min=2), dtype=torch.int64)


@torch.library.register_fake("kept_rows::fragile")
def _(x: Tensor, wide: bool) -> Tensor:
    return torch.empty_like(x)


def uses(kept: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """What is made of some rows of all."""
    attended = torch.nn.functional.scaled_dot_product_attention(rows[None], kept[None], kept[None])[0]
    return {
        "kept": kept,
        "cat": torch.cat([kept, rows]),
        "row": kept + rows.new_ones(1, 4),
        "pairs": (kept[:, None] - kept[None]).abs().sum(-1),
        "sum": kept.sum(0),
        "mean": kept.mean(0),
        "matmul": kept @ rows.T,
        "gram": kept.T @ kept,
        "softmax": (kept @ kept.T).softmax(-1),
        "flat": kept.reshape(-1),
        "halves": kept.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4),
        "normed": torch.nn.functional.layer_norm(kept, (4,)),
        "products": torch.einsum("id,jd->ij", kept, kept),
        "attended": attended,
    }


class Keep(torch.nn.Module):
    def forward(self, rows: Tensor, scores: Tensor) -> dict[str, Tensor]:
        return uses(rows[torch.ops.kept_rows.keep(rows, scores, 0.25)], rows)


class Rows(torch.nn.Module):
    def forward(self, rows: Tensor, scores: Tensor) -> Tensor:
        return rows[torch.ops.kept_rows.keep(rows, scores, 0.25)]


class KeepTwo(torch.nn.Module):
    def forward(self, rows: Tensor, scores: Tensor) -> Tensor:
        return rows[torch.ops.kept_rows.keep_two(rows, scores, 0.25)]


class Fragile(torch.nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, rows: Tensor, scores: Tensor) -> Tensor:
        return torch.ops.kept_rows.fragile(rows, self.wide) * scores[:, None]


def spec(model: torch.nn.Module, least: int) -> ExportSpec:
    """A model of rows and their scores, at least so many."""
    generator = torch.Generator().manual_seed(0)
    rows, scores = torch.randn(8, 4, generator=generator), torch.rand(8, generator=generator) + 0.1
    sizes = {"rows": {0: f"n[{least}:100]"}, "scores": {0: "n"}}
    return ExportSpec(model=model, example_inputs=(rows, scores), dynamic_shapes=sizes)


def keep_any() -> ExportSpec:
    """Of any number of rows."""
    return spec(Keep(), 0)


def keep_of_two() -> ExportSpec:
    """Of two rows or more."""
    return spec(Keep(), 2)
