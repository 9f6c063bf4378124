"""What the recorded cases hold: the tensors of a call by their names in a safetensors file, and eager's errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from exportkit.package.manifest import Accuracy, Case, TensorOutput

if TYPE_CHECKING:
    import torch


def named_tensors(kind: Literal["input", "output"], tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the flat inputs or outputs of a call by their names in a file.

    The tensors are copied, because a model may return transposed tensors or tensors that share memory, and safetensors
    refuses both.
    """
    return {f"{kind}.{i}": tensor.detach().cpu().contiguous().clone() for i, tensor in enumerate(tensors)}


def named_references(
    outputs: Sequence[TensorOutput], references: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns references, given by output, by their names in a file."""
    return {f"reference.{i}": references[output.name] for i, output in enumerate(outputs) if output.name in references}


def references_in(outputs: Sequence[TensorOutput], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the references of a file by output."""
    names = {output.name: f"reference.{i}" for i, output in enumerate(outputs)}
    return {name: tensors[key] for name, key in names.items() if key in tensors}


def worst(errors: Iterable[Accuracy]) -> Accuracy:
    """Returns the greatest of several errors; 0 for none."""
    found = list(errors)
    return Accuracy(
        rms=max((e.rms for e in found), default=0.0), greatest=max((e.greatest for e in found), default=0.0)
    )


def recorded_errors(cases: Iterable[Case]) -> dict[str, list[Accuracy]]:
    """Returns eager's errors in the recorded cases, by output. One call of few elements may happen to be exact."""
    found: dict[str, list[Accuracy]] = {}
    for case in cases:
        for name, accuracy in case.accuracy.items():
            if accuracy is not None:
                found.setdefault(name, []).append(accuracy)
    return found
