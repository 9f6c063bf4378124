"""Which form a part of the model takes: fused operators for inference, or operators that have gradients."""

from __future__ import annotations

import torch
from torch import nn


def differentiates(module: nn.Module) -> bool:
    """Returns whether a gradient can be asked for. The fused forms have none (docs/adr/0008-fused-forms.md)."""
    return module.training or torch.is_grad_enabled()
