"""Reads the tensors of a recorded case and checks them (rule 14 of FORMAT.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from exportkit.errors import CaseError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.sizes import contradicts, shape_at


class CallTensors(NamedTuple):
    """The tensors of one call of a case, on the CPU.

    Attributes:
        inputs: The flat inputs, as they were before the call.
        outputs: Eager's flat outputs.
        written: By input, what eager wrote into it.
        references: By result, what eager should have answered. What is written into an input is `written.<input>`.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    written: dict[str, torch.Tensor]
    references: dict[str, torch.Tensor]


class CaseTensors(NamedTuple):
    """The tensors of a case, on the CPU: those of its calls, and the state after the last one, by name.

    `state` is empty if the case did not record it.
    """

    calls: list[CallTensors]
    state: dict[str, torch.Tensor]
    state_references: dict[str, torch.Tensor]


_Described = package.TensorInput | package.TensorOutput | package.StateTensor


def read_case(reader: PackageReader, case: package.Case) -> CaseTensors:
    """Reads a recorded case.

    Raises:
        CaseError: It is not a safetensors file, or its tensors do not fit the calls.
        DigestMismatchError: The record is damaged.
    """
    # Imported here, because most processes never read a case.
    from safetensors import SafetensorError
    from safetensors.torch import load as load_safetensors

    content = reader.read(case.record)
    try:
        tensors = load_safetensors(content)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise CaseError(f"{case.record} is not a safetensors file: {error}") from error
    read = _CaseReader(reader.manifest, case, tensors)
    calls = [read.call(number, call) for number, call in enumerate(case.calls)]
    state, references = read.state()
    if tensors:
        raise CaseError(f"{case.record} has an unexpected tensor: {min(tensors)}")
    return CaseTensors(calls, state, references)


class _CaseReader:
    """Takes the tensors of a case out of its file, and compares each with the manifest."""

    def __init__(self, manifest: package.Manifest, case: package.Case, tensors: dict[str, torch.Tensor]) -> None:
        self._manifest = manifest
        self._case = case
        self._tensors = tensors

    def call(self, number: int, recorded: package.CaseCall) -> CallTensors:
        """Takes the tensors of one call."""
        call, sizes = self._manifest.method(recorded.method).call, recorded.sizes
        inputs = [self._take(f"{number}.input.{i}", each, sizes) for i, each in enumerate(call.inputs)]
        outputs = [self._take(f"{number}.output.{i}", each, sizes) for i, each in enumerate(call.outputs)]
        changed = [(i, each) for i, each in enumerate(call.inputs) if each.written is not None]
        written = {each.name: self._take(f"{number}.written.{i}", each, sizes) for i, each in changed}
        references = {}
        for i, output in enumerate(call.outputs):
            if output.name in recorded.accuracy:
                references[output.name] = self._reference(f"{number}.reference.{i}", output, outputs[i])
        for i, each in changed:
            if (name := f"written.{each.name}") in recorded.accuracy:
                references[name] = self._reference(f"{number}.written_reference.{i}", each, written[each.name])
        return CallTensors(inputs, outputs, written, references)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Takes the final state and its references; both are empty if the file has none."""
        described = self._manifest.state
        if not any(name.startswith("state") for name in self._tensors):
            return {}, {}
        sizes = case_sizes(self._case)
        state = {each.name: self._take(f"state.{j}", each, sizes) for j, each in enumerate(described)}
        references = {
            each.name: self._reference(f"state_reference.{j}", each, state[each.name])
            for j, each in enumerate(described)
            if each.name in self._case.state_accuracy
        }
        return state, references

    def _take(self, name: str, described: _Described, sizes: Mapping[str, int]) -> torch.Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise CaseError(f"{self._case.record} has no {name} ({described.name})")
        if contradicts(described, tensor.shape, sizes) or tensor.dtype is not getattr(torch, described.dtype):
            wanted = ["*" if size is None else size for size in shape_at(described, sizes)]
            raise CaseError(
                f"{self._case.record}: {name} ({described.name}) is {tensor_text(tensor)}; the manifest says "
                f"{described.dtype}{wanted}"
            )
        return tensor

    def _reference(self, name: str, described: _Described, answer: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if answer.dtype in (torch.float32, torch.float64) else torch.float32
        dtype = wide if answer.is_floating_point() else answer.dtype
        found = self._tensors.pop(name, None)
        if found is None or found.dtype is not dtype or found.shape != answer.shape:
            raise CaseError(
                f"{self._case.record} must have a {name} ({described.name}) of {str(dtype).removeprefix('torch.')} "
                f"and the sizes of {tensor_text(answer)}"
            )
        return found


def case_sizes(case: package.Case) -> dict[str, int]:
    """Returns the sizes of all of a case's calls. Calls agree on those of the state."""
    return {name: size for call in case.calls for name, size in call.sizes.items()}


def tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """Returns such as "float32[2, 3], int64[2]"."""
    return ", ".join(map(tensor_text, tensors))


def tensor_text(tensor: torch.Tensor) -> str:
    """Returns such as "float32[2, 3, 64, 64]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
