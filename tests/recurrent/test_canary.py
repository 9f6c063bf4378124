"""What torch cannot do by itself. When a test fails, the code that it names may go."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from exportkit.export.torch_patches.quiet import quiet_torch


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_torch_export_still_fixes_the_length_of_a_recurrent_layer(kind: type[nn.RNNBase]) -> None:
    """If not: exportkit/export/trace/recurrent_layers.py need not replace it, once torch 2.13 no longer exports.

    exportkit/recurrent and csrc/recurrent must stay: packages and programs that are written call the operators.
    """
    layer = kind(3, 4).eval()
    with quiet_torch(), torch.no_grad(), pytest.raises(Exception, match="specialized"):
        torch.export.export(layer, (torch.randn(5, 2, 3),), dynamic_shapes=({0: Dim("length", min=2, max=9)},))


def test_torch_export_still_takes_no_packed_sequences() -> None:
    """If it does: the same for what packs and unpacks."""

    class Packed(nn.Module):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
            return nn.utils.rnn.pad_packed_sequence(packed, total_length=x.shape[0])[0]

    inputs = (torch.randn(5, 2, 3), torch.tensor([5, 3]))
    with quiet_torch(), torch.no_grad(), pytest.raises(Exception, match="data-dependent expression u0 > 5"):
        torch.export.export(Packed(), inputs)
