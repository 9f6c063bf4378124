"""Reads the tensors of a recorded case and checks them (rule 14 of FORMAT.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from exportkit.errors import CaseError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.sizes import contradicts, shape_at


class CaseTensors(NamedTuple):
    """The tensors of a case, on the CPU: flat inputs, eager's flat outputs, and references by output."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    references: dict[str, torch.Tensor]


def read_case(reader: PackageReader, case: package.Case) -> CaseTensors:
    """Reads a recorded case.

    Raises:
        CaseError: It is not a safetensors file, or its tensors do not fit the call.
        DigestMismatchError: The record is damaged.
    """
    # Imported here, because most processes never read a case.
    from safetensors import SafetensorError
    from safetensors.torch import load as load_safetensors

    call, content = reader.manifest.call, reader.read(case.record)
    try:
        tensors = load_safetensors(content)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise CaseError(f"{case.record} is not a safetensors file: {error}") from error
    inputs = _tensors_of(case, "input", call.inputs, tensors)
    outputs = _tensors_of(case, "output", call.outputs, tensors)
    references = _references_of(case, call.outputs, outputs, tensors)
    if tensors:
        raise CaseError(f"{case.record} has an unexpected tensor: {min(tensors)}")
    return CaseTensors(inputs, outputs, references)


def _tensors_of(
    case: package.Case,
    kind: str,
    expected: Sequence[package.TensorInput | package.TensorOutput],
    tensors: dict[str, torch.Tensor],
) -> list[torch.Tensor]:
    """Pops the case's inputs or outputs from `tensors`. Raises CaseError if one differs from the manifest."""
    found = []
    for index, described in enumerate(expected):
        tensor = tensors.pop(f"{kind}.{index}", None)
        if tensor is None:
            raise CaseError(f"{case.record} has no {kind}.{index} ({described.name})")
        if contradicts(described, tensor.shape, case.sizes) or tensor.dtype is not getattr(torch, described.dtype):
            sizes = ["*" if size is None else size for size in shape_at(described, case.sizes)]
            raise CaseError(
                f"{case.record}: {kind}.{index} ({described.name}) is {tensor_text(tensor)}; the manifest says "
                f"{described.dtype}{sizes}"
            )
        found.append(tensor)
    return found


def _references_of(
    case: package.Case,
    outputs: Sequence[package.TensorOutput],
    eager: Sequence[torch.Tensor],
    tensors: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Pops the case's references, by output, from `tensors`. Raises CaseError if one does not fit its output."""
    references = {}
    for index, (output, answer) in enumerate(zip(outputs, eager)):
        if output.name not in case.accuracy:
            continue
        wide = torch.float64 if answer.dtype in (torch.float32, torch.float64) else torch.float32
        dtype = wide if answer.is_floating_point() else answer.dtype
        found = tensors.pop(f"reference.{index}", None)
        if found is None or found.dtype is not dtype or found.shape != answer.shape:
            raise CaseError(
                f"{case.record} must have a reference.{index} ({output.name}) of {str(dtype).removeprefix('torch.')} "
                f"and the sizes of {tensor_text(answer)}"
            )
        references[output.name] = found
    return references


def tensor_text(tensor: torch.Tensor) -> str:
    """Returns such as "float32[2, 3, 64, 64]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
