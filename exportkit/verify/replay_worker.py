"""The replay process: it has the package, torch and the runtime, but not the exporter or any model source."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from exportkit.child.messages import serve
from exportkit.verify.commands import ArtifactLoaded, CallModel, LoadArtifact, ModelCalled

if TYPE_CHECKING:
    from exportkit.package.archive import PackageReader

EXPORTER = "exportkit.export"


class BlockedImports:
    """An import hook that treats modules as not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for a blocked module. None lets the next finder search."""
        if any(name == blocked or name.startswith(f"{blocked}.") for blocked in self.names):
            raise ModuleNotFoundError(f"the replay process cannot import {name}", name=name)
        return None


class Replay:
    """One loaded artifact."""

    def __init__(self) -> None:
        self.model: Any = None
        self.call: Any = None
        self.device = "cpu"
        self._unpacked = tempfile.TemporaryDirectory(prefix="exportkit-program-")

    def load(self, command: LoadArtifact) -> ArtifactLoaded:
        """Loads the operator libraries that the artifact does not contain, then the artifact."""
        sys.meta_path.insert(0, BlockedImports([EXPORTER, *command.blocked]))
        import torch

        from exportkit.libraries import LoadedLibrary, load_library
        from exportkit.precision import allow_tf32

        # Use TF32 exactly if the recording did: convolutions use it by default, which changes their outputs slightly.
        allow_tf32(command.tf32)
        loaded: list[LoadedLibrary] = []
        for library, namespaces in command.libraries:
            loaded.append(load_library(Path(library), defines=namespaces, beside=loaded))
        start = time.perf_counter()
        reader = _opened(command)
        if command.target is None:
            self._load_program(reader, command.device)
        else:
            self._load_target(reader, command.target, command.device)
        return ArtifactLoaded(self.device, str(torch.__version__), time.perf_counter() - start)

    def run(self, command: CallModel) -> ModelCalled:
        """Calls the model."""
        import msgspec
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file

        from exportkit.package.case_files import named_tensors
        from exportkit.package.structure import flatten, unflatten

        with safe_open(command.inputs, framework="pt", device=self.device) as file:
            flat = [file.get_tensor(f"input.{i}") for i in range(len(self.call.inputs))]
        args, kwargs = [], {}
        for parameter in self.call.parameters:
            value = unflatten(parameter.value, flat)
            if parameter.kind == "positional":
                args.append(value)
            else:
                kwargs[parameter.name] = value
        start = time.perf_counter()
        with torch.no_grad():
            result = self.model(*args, **kwargs)
            if self.device.startswith("cuda"):
                torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - start
        node, leaves = flatten(result, lambda leaf: isinstance(leaf, torch.Tensor))
        save_file(named_tensors("output", leaves), command.outputs)
        return ModelCalled(seconds, msgspec.json.encode(node).decode())

    def _load_target(self, reader: PackageReader, target: str, device: str) -> None:
        from exportkit.runtime.loader import load_opened

        self.model = load_opened(reader, device=device, target=target)
        self.call = self.model.manifest.call
        self.device = str(self.model.device)

    def _load_program(self, reader: PackageReader, device: str) -> None:
        from exportkit.program_reader import read_program

        with reader:
            reader.verify()
            program = reader.manifest.program
            assert program is not None
            self.call = reader.manifest.call
            self.device = device
            unpacked = Path(self._unpacked.name) / "program.pt2"
            reader.extract(program.record, unpacked)
        self.model = self._named(read_program(unpacked).module())

    def _named(self, program: Any) -> Any:
        """Restores named tuples in the result from the manifest: a program takes and returns plain tuples."""
        import torch

        from exportkit.package.structure import flatten, plain, unflatten

        def call(*args: Any, **kwargs: Any) -> Any:
            result = program(*plain(args), **plain(kwargs))
            _, leaves = flatten(result, lambda leaf: isinstance(leaf, torch.Tensor))
            if len(leaves) != len(self.call.outputs):
                return result
            named = unflatten(self.call.result, leaves)
            return named if _same_structure(plain(named), result) else result

        return call


def _opened(command: LoadArtifact) -> PackageReader:
    """Opens the artifact with its required signature, or the one artifact that may be loaded without it."""
    from exportkit.errors import DigestMismatchError
    from exportkit.package.archive import PackageReader
    from exportkit.package.trust import Trust

    artifact = Path(command.artifact)
    if command.unsigned is None:
        signature = Path(command.signature) if command.signature else None
        return PackageReader(artifact, demand=Trust(command.public_keys, signature).demand())
    reader = PackageReader(artifact)
    if reader.manifest_sha256 != command.unsigned:
        reader.close()
        raise DigestMismatchError(
            f"the manifest of {artifact.name} has sha256 {reader.manifest_sha256}; only the one with "
            f"{command.unsigned} may be run without a signature",
            hint="The package was changed while it was made. Make it again in a folder that only you can write to.",
        )
    return reader


def _same_structure(a: Any, b: Any) -> bool:
    from torch.utils._pytree import tree_structure

    return tree_structure(a) == tree_structure(b)


def main(connection: socket.socket) -> None:
    """Serves the commands of the parent."""
    replay = Replay()
    serve(connection, {LoadArtifact: replay.load, CallModel: replay.run})
