"""The names and the form that the tensors of a call have in a safetensors file: a recorded case, or a call's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


def named_tensors(kind: Literal["input", "output"], tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The flat inputs or outputs of a call by the names that a file has them under, as safetensors takes them.

    It takes neither transposed tensors nor two that share memory, and a model may well return such: they are copied.
    """
    return {f"{kind}.{i}": tensor.detach().cpu().contiguous().clone() for i, tensor in enumerate(tensors)}
