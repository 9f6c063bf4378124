"""Calls the exported programs of a package, each a method, with the state of sessions as their last arguments."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_structure

from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Manifest, PackagedMethod
from exportkit.package.structure import flatten, plain, unflatten
from exportkit.program_reader import read_program
from exportkit.runtime.state import StatePlan

STATE_ARGUMENT = "exportkit_state"  # of a program: a tuple of the state's tensors


class ReplayedProgram:
    """The programs of a package on a device.

    Attributes:
        methods: The methods without state, by name.
    """

    def __init__(self, reader: PackageReader, device: str) -> None:
        self._device = device
        self._folder = tempfile.TemporaryDirectory(prefix="exportkit-program-")
        self._manifest: Manifest = reader.manifest
        self._programs: dict[str, Callable[..., Any]] = {}
        program = reader.manifest.program
        assert program is not None
        reader.verify()
        for method, record in program.records.items():
            unpacked = Path(self._folder.name) / f"{method}.pt2"
            reader.extract(record, unpacked)
            self._programs[method] = read_program(unpacked).module()
        self._state = StatePlan(reader, torch.device(device))
        self.methods = {
            method.name: _Method(method, self._programs[method.name], ())
            for method in reader.manifest.methods
            if not method.state
        }

    def session(self, **sizes: int) -> ProgramSession:
        """Opens a session with these sizes of the state."""
        names = [each.name for each in self._manifest.state]
        return ProgramSession(self._manifest, self._programs, dict(zip(names, self._state.new(sizes))))

    def synchronize(self) -> None:
        """Waits for its GPU."""
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)


class ProgramSession:
    """The state of one sequence of calls.

    Attributes:
        state: The state by name.
        methods: The methods by name, with this state.
    """

    def __init__(
        self, manifest: Manifest, programs: Mapping[str, Callable[..., Any]], state: dict[str, torch.Tensor]
    ) -> None:
        self.state = state
        names = [each.name for each in manifest.state]
        self.methods = {
            method.name: _Method(method, programs[method.name], tuple(state[names[use.index]] for use in method.state))
            for method in manifest.methods
        }

    def synchronize(self) -> None:
        """Waits for the GPU that it is on."""
        if any(tensor.is_cuda for tensor in self.state.values()):
            torch.cuda.synchronize()

    def close(self) -> None:
        """Gives the state back."""
        self.state, self.methods = {}, {}


class _Method:
    """A program, and the state that it takes after its inputs."""

    def __init__(self, method: PackagedMethod, program: Callable[..., Any], state: tuple[torch.Tensor, ...]) -> None:
        self._call, self._program, self._state = method.call, program, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Restores named tuples in the result from the manifest: a program takes and returns plain tuples."""
        state = {STATE_ARGUMENT: self._state} if self._state else {}
        result = self._program(*plain(args), **plain(kwargs), **state)
        _, leaves = flatten(result, lambda leaf: isinstance(leaf, torch.Tensor))
        if len(leaves) != len(self._call.outputs):
            return result
        named = unflatten(self._call.result, leaves)
        return named if tree_structure(plain(named)) == tree_structure(result) else result
