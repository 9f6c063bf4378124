"""What the recorded cases hold: the tensors of calls by their names in a safetensors file, and eager's errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec

from exportkit.errors import PackageError
from exportkit.package.manifest import Accuracy, Call, Case, StateTensor, TensorOutput

if TYPE_CHECKING:
    import torch

    from exportkit.package.archive import PackageReader

T = TypeVar("T")

EDGE_CASE = "edge_case"
"""The key of a file's metadata that says what makes a case's inputs edge values."""

MOVES = "moves"
"""The key of a file's metadata that says how far eager moves when it rounds otherwise: JSON, by a result's tensor."""


OUT_OF_RANGE = ("far below", "far above")
"""Kinds of edge values that no case has: integers that are no index into a tensor of a usual size, for `verify`."""

_MOVES = 2.0  # times as far as in the few runs that were tried
_SAID = re.compile(r"[\w ,.*-]{1,1000}")  # a stranger's file may say anything


def edge_case_of(head: bytes) -> str:
    """Returns what makes the inputs of a case edge values, such as "ties in x"; empty if they were only drawn.

    Args:
        head: The beginning of the case's file, which the reader of packages has checked: its header at least.
    """
    said = _metadata(head, EDGE_CASE)
    return said if _SAID.fullmatch(said) else ""


def moves_of(content: bytes) -> dict[str, Accuracy]:
    """Returns how far eager moves when it rounds otherwise, by the name of a result's tensor: FORMAT.md, "Verdicts".

    Args:
        content: The case's file, or the beginning of it, as `edge_case_of` takes it.
    """
    with suppress(msgspec.DecodeError):  # a stranger's file may say anything
        return msgspec.json.decode(_metadata(content, MOVES), type=dict[str, Accuracy])
    return {}


def _metadata(head: bytes, key: str) -> str:
    header = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return str(metadata.get(key, "")) if isinstance(metadata, dict) else ""


def edge_case_in(reader: PackageReader, case: Case) -> str:
    """Returns what makes the inputs of a package's case edge values; empty if it cannot be read."""
    try:
        return edge_case_of(reader.read(case.record))
    except (PackageError, ValueError):  # what is wrong with the case, its own check says
        return ""


def edge_inputs(edge_case: str) -> dict[str, str]:
    """Returns by input the kind of its edge values: of "ties in x, NaN in y", ties for x and NaN for y."""
    parts = (part.rpartition(" in ") for part in edge_case.split(", "))
    return {name: kind for kind, _, name in parts}


def results_of(call: Call) -> tuple[TensorOutput, ...]:
    """Returns what a call gives: its outputs, then what it writes into inputs, named `written.<input>`."""
    written = (
        TensorOutput(name=f"written.{each.name}", dtype=each.dtype, shape=each.shape, tolerance=each.written)
        for each in call.inputs
        if each.written is not None
    )
    return (*call.outputs, *written)


def state_results(state: Iterable[StateTensor]) -> tuple[TensorOutput, ...]:
    """Returns a model's state as results, which are compared like outputs."""
    return tuple(
        TensorOutput(name=each.name, dtype=each.dtype, shape=each.shape, tolerance=each.tolerance) for each in state
    )


def named_tensors(kind: str, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns flat tensors by their names in a file, such as `0.input.2` where `kind` is `0.input`.

    The tensors are copied, because a model may return transposed tensors or tensors that share memory, and safetensors
    refuses both.
    """
    return {f"{kind}.{i}": stored(tensor) for i, tensor in enumerate(tensors)}


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor that a safetensors file can hold."""
    return tensor.detach().cpu().contiguous().clone()


def result_keys(number: int, call: Call, *, reference: bool = False) -> dict[str, str]:
    """Returns by result its name in a file, or that of its reference.

    Args:
        number: The number of the call in its sequence.
        call: The call.
        reference: Whether the references' names are wanted.
    """
    output, written = ("reference", "written_reference") if reference else ("output", "written")
    keys = {each.name: f"{number}.{output}.{i}" for i, each in enumerate(call.outputs)}
    inputs = ((i, each) for i, each in enumerate(call.inputs) if each.written is not None)
    return keys | {f"written.{each.name}": f"{number}.{written}.{i}" for i, each in inputs}


def state_keys(state: Sequence[StateTensor], *, reference: bool = False) -> dict[str, str]:
    """Returns by state its name in a file, or that of its reference."""
    kind = "state_reference" if reference else "state"
    return {each.name: f"{kind}.{j}" for j, each in enumerate(state)}


def named_results(keys: Mapping[str, str], results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns results, given by name, by their names in a file. `keys` comes from result_keys or state_keys."""
    return {keys[name]: stored(tensor) for name, tensor in results.items()}


def results_in(keys: Mapping[str, str], tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns what a file has of results, by their names. `keys` comes from result_keys or state_keys."""
    return {name: tensors[key] for name, key in keys.items() if key in tensors}


def worst(errors: Iterable[Accuracy]) -> Accuracy:
    """Returns the greatest of several errors; 0 for none."""
    found = list(errors)
    return Accuracy(
        rms=max((e.rms for e in found), default=0.0), greatest=max((e.greatest for e in found), default=0.0)
    )


def explains(moves: Accuracy, away: Accuracy) -> bool:
    """Returns whether being so far away from eager's result shows nothing, because eager itself moves by as much."""
    return away.rms <= _MOVES * moves.rms and away.greatest <= _MOVES * moves.greatest


def recorded_errors(cases: Iterable[Case], method: str) -> dict[str, list[Accuracy]]:
    """Returns eager's errors in the recorded calls of a method, by result.

    One call of few elements may happen to be exact.
    """
    calls = (call for case in cases for call in case.calls if call.method == method)
    return _errors(call.accuracy for call in calls)


def recorded_state_errors(cases: Iterable[Case]) -> dict[str, list[Accuracy]]:
    """Returns eager's errors in the state after the recorded cases, by name."""
    return _errors(case.state_accuracy for case in cases)


def _errors(recorded: Iterable[Mapping[str, Accuracy | None]]) -> dict[str, list[Accuracy]]:
    found: dict[str, list[Accuracy]] = {}
    for accuracies in recorded:
        for name, accuracy in accuracies.items():
            if accuracy is not None:
                found.setdefault(name, []).append(accuracy)
    return found
