"""The bytes of a tensor's elements."""

from __future__ import annotations

import torch


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's elements as uint8[bytes], in the order of its indices; without a copy where they lie so."""
    # An expanded scalar has a stride of 0 and counts as contiguous; `view` demands a stride of 1.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)
