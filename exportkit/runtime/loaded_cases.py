"""The recorded cases of a loaded package: sequences of calls, each in a session of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from exportkit.errors import ModelClosedError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.package.structure import builder
from exportkit.runtime.case_tensors import CallTensors, read_case


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

    def _read(self, case: package.Case) -> LoadedCase:
        manifest = self._reader.manifest
        if self._reader.fileno() < 0:
            raise ModelClosedError(f"the model {manifest.name} was closed, and its package with it")
        tensors = read_case(self._reader, case)
        calls = tuple(self._call(recorded, found) for recorded, found in zip(case.calls, tensors.calls))
        dimensions = {
            size.dimension for each in manifest.state for size in each.shape if isinstance(size, package.Size)
        }
        sizes = {name: size for call in case.calls for name, size in call.sizes.items() if name in dimensions}
        state = self._moved(tensors.state)
        return LoadedCase(calls, sizes, state, tensors.state_references, tensors.state_moves, tensors.edge_case)

    def _call(self, recorded: package.CaseCall, tensors: CallTensors) -> LoadedCall:
        call = self._reader.manifest.method(recorded.method).call
        inputs, outputs = ([tensor.to(self._device) for tensor in part] for part in (tensors.inputs, tensors.outputs))
        values = {parameter: builder(parameter.value)(inputs) for parameter in call.parameters}
        return LoadedCall(
            method=recorded.method,
            args=tuple(value for parameter, value in values.items() if parameter.kind == "positional"),
            kwargs={parameter.name: value for parameter, value in values.items() if parameter.kind == "keyword"},
            outputs=builder(call.result)(outputs),
            sizes=dict(recorded.sizes),
            references=tensors.references,
            written=self._moved(tensors.written),
            moves=tensors.moves,
        )

    def _moved(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}
