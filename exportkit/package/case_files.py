"""Names the tensors of a call in a safetensors file, such as a recorded case."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


def named_tensors(kind: Literal["input", "output"], tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the flat inputs or outputs of a call by their names in a file.

    The tensors are copied, because a model may return transposed tensors or tensors that share memory, and safetensors
    refuses both.
    """
    return {f"{kind}.{i}": tensor.detach().cpu().contiguous().clone() for i, tensor in enumerate(tensors)}
