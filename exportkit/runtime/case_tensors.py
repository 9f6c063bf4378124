"""Reads the tensors of a recorded case. The reader of packages checks them (rule 14 of FORMAT.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from exportkit.errors import CaseError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.package.case_files import edge_case_of, moves_of, result_keys, results_in, state_keys


class CallTensors(NamedTuple):
    """The tensors of one call of a case, on the CPU.

    Attributes:
        inputs: The flat inputs, as they were before the call.
        outputs: Eager's flat outputs.
        written: By input, what eager wrote into it.
        references: By result, what eager should have answered. What is written into an input is `written.<input>`.
        moves: By result, how far eager moves when it rounds otherwise.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    written: dict[str, torch.Tensor]
    references: dict[str, torch.Tensor]
    moves: dict[str, package.Accuracy]


class CaseTensors(NamedTuple):
    """The tensors of a case, on the CPU: those of its calls, and the state after the last one, by name.

    `state` is empty if the case did not record it. `edge_case` says what makes the inputs edge values, such as
    "ties in x".
    """

    calls: list[CallTensors]
    state: dict[str, torch.Tensor]
    state_references: dict[str, torch.Tensor]
    state_moves: dict[str, package.Accuracy]
    edge_case: str


def read_case(reader: PackageReader, case: package.Case) -> CaseTensors:
    """Reads a recorded case.

    Raises:
        CaseError: It is not a safetensors file, or its tensors do not fit the calls.
        DigestMismatchError: The record is damaged.
    """
    # Imported here, because most processes never read a case.
    from safetensors import SafetensorError
    from safetensors.torch import load as load_safetensors

    manifest = reader.manifest
    content = reader.read_case([each.record for each in manifest.cases].index(case.record))
    try:
        tensors = load_safetensors(content)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that this torch does not have
        raise CaseError(f"{case.record} cannot be read with torch {torch.__version__}: {error}") from error
    moves = moves_of(content)
    calls = [
        _call_tensors(number, manifest.method(recorded.method).call, tensors, moves)
        for number, recorded in enumerate(case.calls)
    ]
    state, references = (
        results_in(state_keys(manifest.state, reference=reference), tensors) for reference in (False, True)
    )
    state_moves = results_in(state_keys(manifest.state), moves)
    return CaseTensors(calls, state, references, state_moves, edge_case_of(content))


def _call_tensors(
    number: int, call: package.Call, tensors: dict[str, torch.Tensor], moves: dict[str, package.Accuracy]
) -> CallTensors:
    keys = result_keys(number, call)
    return CallTensors(
        inputs=[tensors[f"{number}.input.{place}"] for place in range(len(call.inputs))],
        outputs=[tensors[keys[output.name]] for output in call.outputs],
        written={each.name: tensors[keys[f"written.{each.name}"]] for each in call.inputs if each.written is not None},
        references=results_in(result_keys(number, call, reference=True), tensors),
        moves=results_in(keys, moves),
    )


def tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """Returns such as "float32[2, 3], int64[2]"."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
