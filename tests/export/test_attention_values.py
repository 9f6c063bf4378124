"""Which blocks of an attention's mask are checked: all but those that never change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from exportkit.export.compile.refusable_values import ATTENTION, refuse_in_attention

COUNTS, BLOCKS = torch.full((1, 1, 2), 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)


class Masked(nn.Module):
    """Attention whose mask has blocks of its own, or given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.blocks = nn.Buffer(COUNTS, persistent=False), nn.Buffer(BLOCKS, persistent=False)

    def forward(self, x: Tensor, counts: Tensor | None, blocks: Tensor | None) -> Tensor:
        counts = self.counts if counts is None else counts
        blocks = self.blocks if blocks is None else blocks
        answer: Tensor = flex_attention(x, x, x, block_mask=BlockMask.from_kv_blocks(counts, blocks))
        return answer


class Whole(nn.Module):
    """Attention without a mask: torch makes one whose one block is all."""

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = flex_attention(x, x, x)
        return answer


def test_a_mask_that_follows_from_nothing_is_not_checked():
    program = torch.export.export(Whole(), (torch.randn(1, 2, 256, 16),))
    module = program.module(check_guards=False)
    before = str(module.graph)
    refuse_in_attention(module, module.graph.find_nodes(op="placeholder")[0], ())
    assert str(module.graph) == before


@pytest.mark.parametrize("counts", [None, COUNTS])
@pytest.mark.parametrize("blocks", [None, BLOCKS])
@pytest.mark.parametrize("constants", [{"counts", "blocks"}, {"blocks"}, set()])
def test_blocks_are_checked_unless_both_of_their_tensors_never_change(counts, blocks, constants):
    program = torch.export.export(Masked(), (torch.randn(1, 2, 256, 16), counts, blocks))
    module = program.module(check_guards=False)
    memory = module.graph.find_nodes(op="placeholder")[0]
    refuse_in_attention(module, memory, constants)
    (node,) = module.graph.find_nodes(op="call_function", target=ATTENTION)
    checked = [each.target is torch.ops.aten.index.Tensor for each in node.args[4][2:4]]
    never_change = counts is None and blocks is None and constants == {"counts", "blocks"}
    assert checked == [not never_change] * 2
