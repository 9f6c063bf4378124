"""The replay process: it has the package, torch and the runtime, but not the exporter or any model source."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from exportkit.child.messages import Message, serve
from exportkit.verify.commands import ArtifactLoaded, CallModel, LoadArtifact, ModelCalled, SessionReady, UseSession
from exportkit.verify.filled_memory import filled_memory

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
    """One loaded artifact and its open sessions, by number."""

    def __init__(self) -> None:
        self._manifest: Any = None
        self._model: Any = None
        self._device = "cpu"
        self._sessions: dict[int, Any] = {}

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
        self._manifest = reader.manifest
        if command.target is None:
            from exportkit.verify.program_replay import ReplayedProgram

            self._model, self._device = ReplayedProgram(reader, command.device), command.device
        else:
            from exportkit.runtime.loader import load_opened

            self._model = load_opened(reader, device=command.device, target=command.target)
            self._device = str(self._model.device)
        return ArtifactLoaded(self._device, str(torch.__version__), time.perf_counter() - start)

    def run(self, command: CallModel) -> ModelCalled:
        """Calls a method, in a session or without one."""
        with filled_memory(command.memory, self._device):
            return self._run(command)

    def _run(self, command: CallModel) -> ModelCalled:
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file

        from exportkit.package.structure import arguments
        from exportkit.runtime.loaded_cases import answers_of
        from exportkit.verify.layouts import laid_out

        method = self._manifest.method(command.method)
        call, number = method.call, command.number
        with safe_open(command.inputs, framework="pt", device=self._device) as file:
            flat = [file.get_tensor(f"{number}.input.{i}") for i in range(len(call.inputs))]
        flat = [laid_out(tensor, layout) for tensor, layout in zip(flat, command.layouts or [""] * len(flat))]
        args, kwargs = arguments(call, flat)
        session = command.session
        owner = self._model if session is None else self._sessions[session]
        called = owner.methods[method.name]
        start = time.perf_counter()
        with torch.no_grad():
            result = called(*args, **kwargs)
            owner.synchronize()  # says what a call on a GPU refused, too
        seconds = time.perf_counter() - start
        answers, structure = answers_of(number, call, result, flat)
        save_file(answers, command.outputs)
        return ModelCalled(seconds, structure)

    def use(self, command: UseSession) -> SessionReady:
        """Does something with a session."""
        sessions, number = self._sessions, command.session
        match command.do:
            case "open":
                sessions[number] = self._model.session(**command.sizes)
            case "fork":
                sessions[command.copy] = sessions[number].fork()
            case "reset":
                sessions[number].reset()
            case "spoil":
                _spoil(sessions[number].state)
            case "save":
                sessions[number].save(command.file)
            case "load":
                sessions[number].load_state(command.file)
            case "read":
                self._read(sessions[number].state, command.file)
            case "close":
                sessions.pop(number).close()
        return SessionReady()

    def _read(self, state: Mapping[str, Any], file: str) -> None:
        from safetensors.torch import save_file

        from exportkit.package.case_files import named_results, state_keys

        save_file(named_results(state_keys(self._manifest.state), dict(state)), file)


def _spoil(state: Mapping[str, Any]) -> None:
    """Changes each element of the state: what does not restore it, or shares its memory, is seen then."""
    import torch

    with torch.no_grad():
        for tensor in state.values():
            content = tensor.view(-1).view(torch.uint8)
            if tensor.is_floating_point() or tensor.is_complex():
                content.fill_(0x3F)  # about 1 in most dtypes
            else:
                content[:: tensor.element_size()].bitwise_xor_(1)  # a position stays one


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


def handlers(replay: Replay) -> dict[type[Message], Callable[[Any], Message]]:
    """Returns by the class of a command what answers it."""
    return {LoadArtifact: replay.load, CallModel: replay.run, UseSession: replay.use}


def main(connection: socket.socket) -> None:
    """Serves the commands of the parent."""
    serve(connection, handlers(Replay()))
