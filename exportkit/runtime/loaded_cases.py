"""The recorded cases of a loaded package: sequences of calls, each in a session of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import msgspec
import torch

from exportkit.errors import CaseError, ModelClosedError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.package.case_files import (
    edge_case_of,
    moves_of,
    named_results,
    named_tensors,
    result_keys,
    results_in,
    state_keys,
)
from exportkit.package.structure import arguments, flatten, unflatten
from exportkit.sizes import state_sizes


@dataclass(frozen=True, eq=False)
class LoadedCall:
    """A call that was recorded at export. All tensors but the references are on the model's device.

    Attributes:
        method: The name of the method that was called.
        args: Positional arguments, as they were before the call.
        kwargs: Keyword arguments, as they were before the call.
        outputs: The output of the eager model.
        sizes: The value of each dimension, by name.
        references: By result, on the CPU, what eager should have answered: FORMAT.md, "Verdicts". What is written into
            an input has the name `written.<input>`.
        written: By input, what eager wrote into it.
        moves: By result, how far eager moves when it rounds otherwise; none where it does not matter.
    """

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Any
    sizes: Mapping[str, int]
    references: Mapping[str, torch.Tensor]
    written: Mapping[str, torch.Tensor]
    moves: Mapping[str, package.Accuracy]


@dataclass(frozen=True, eq=False)
class LoadedCase:
    """Calls that were recorded at export, one after another in one session.

    `model(*case.args, **case.kwargs)` repeats a case of one call. `args`, `sizes` and the like are the first call's.

    Attributes:
        calls: The calls in order.
        state_sizes: The sizes of the state, by dimension: `model.session(**case.state_sizes)`.
        state: The state after the last call, by name; empty if it was not recorded.
        state_references: What it should have been, on the CPU.
        state_moves: As the calls' `moves`.
        edge_case: What makes the inputs edge values, such as "ties in x"; empty if they were only drawn.
    """

    calls: tuple[LoadedCall, ...]
    state_sizes: Mapping[str, int]
    state: Mapping[str, torch.Tensor]
    state_references: Mapping[str, torch.Tensor]
    state_moves: Mapping[str, package.Accuracy]
    edge_case: str = ""

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the first call."""
        return self.calls[0].args

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The keyword arguments of the first call."""
        return self.calls[0].kwargs

    @property
    def outputs(self) -> Any:
        """The output of the first call."""
        return self.calls[0].outputs

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the first call."""
        return self.calls[0].sizes

    @property
    def references(self) -> Mapping[str, torch.Tensor]:
        """The references of the first call."""
        return self.calls[0].references


class CaseFile(NamedTuple):
    """The file of a recorded case: its tensors by name, on the CPU, and what its metadata says."""

    tensors: dict[str, torch.Tensor]
    moves: dict[str, package.Accuracy]
    edge_case: str


def read_case(reader: PackageReader, case: package.Case) -> CaseFile:
    """Reads a recorded case. The reader of packages checks its tensors (rule 14 of FORMAT.md).

    CaseError: it is not a safetensors file, or its tensors do not fit the calls. DigestMismatchError: it is damaged.
    """
    # Imported here, because most processes never read a case.
    from safetensors import SafetensorError
    from safetensors.torch import load as load_safetensors

    content = reader.read_case([each.record for each in reader.manifest.cases].index(case.record))
    try:
        tensors = load_safetensors(content)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that this torch does not have
        raise CaseError(f"{case.record} cannot be read with torch {torch.__version__}: {error}") from error
    return CaseFile(tensors, moves_of(content), edge_case_of(content))


class Cases(Sequence[LoadedCase]):
    """The recorded cases of a package. Each is read, and its digest checked, on access."""

    def __init__(self, reader: PackageReader, device: torch.device) -> None:
        """Reads from an open package and moves tensors to `device`."""
        self._reader = reader
        self._device = device

    def __len__(self) -> int:
        return len(self._reader.manifest.cases)

    @overload
    def __getitem__(self, index: int) -> LoadedCase: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LoadedCase]: ...
    def __getitem__(self, index: int | slice) -> LoadedCase | Sequence[LoadedCase]:
        """Reads a case.

        Raises:
            IndexError: The case does not exist.
            PackageError: The record is damaged, or its tensors differ from the manifest.
            ModelClosedError: The model was closed.
        """
        cases = self._reader.manifest.cases
        if isinstance(index, slice):
            return [self._read(case) for case in cases[index]]
        return self._read(cases[index])

    def file(self, case: package.Case) -> CaseFile:
        """Reads the file of one of the cases. Raises the errors of `__getitem__`."""
        if self._reader.fileno() < 0:
            raise ModelClosedError(f"the model {self._reader.manifest.name} was closed, and its package with it")
        return read_case(self._reader, case)

    def _read(self, case: package.Case) -> LoadedCase:
        file, manifest = self.file(case), self._reader.manifest
        keys, references = state_keys(manifest.state), state_keys(manifest.state, reference=True)
        return LoadedCase(
            calls=tuple(self._call(number, recorded, file) for number, recorded in enumerate(case.calls)),
            state_sizes=state_sizes(manifest, case),
            state=self._moved(results_in(keys, file.tensors)),
            state_references=results_in(references, file.tensors),
            state_moves=results_in(keys, file.moves),
            edge_case=file.edge_case,
        )

    def _call(self, number: int, recorded: package.CaseCall, file: CaseFile) -> LoadedCall:
        call = self._reader.manifest.method(recorded.method).call
        keys = result_keys(number, call)
        inputs = [file.tensors[f"{number}.input.{place}"].to(self._device) for place in range(len(call.inputs))]
        outputs = [file.tensors[keys[output.name]].to(self._device) for output in call.outputs]
        written = {each.name: f"written.{each.name}" for each in call.inputs if each.written is not None}
        args, kwargs = arguments(call, inputs)
        return LoadedCall(
            method=recorded.method,
            args=args,
            kwargs=kwargs,
            outputs=unflatten(call.result, outputs),
            sizes=dict(recorded.sizes),
            references=results_in(result_keys(number, call, reference=True), file.tensors),
            written=self._moved({name: file.tensors[keys[result]] for name, result in written.items()}),
            moves=results_in(keys, file.moves),
        )

    def _moved(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}


def answers_of(
    number: int, call: package.Call, result: Any, inputs: Sequence[torch.Tensor]
) -> tuple[dict[str, torch.Tensor], str]:
    """Returns what a call gave, by the names in a file, and the structure of its result: a Node, as JSON.

    It is the call of this number in a sequence. Its flat inputs have what it wrote into them.
    """
    node, leaves = flatten(result, lambda part: isinstance(part, torch.Tensor))
    written = {f"written.{each.name}": t for each, t in zip(call.inputs, inputs) if each.written is not None}
    named = named_tensors(f"{number}.output", leaves) | named_results(result_keys(number, call), written)
    return named, msgspec.json.encode(node).decode()
