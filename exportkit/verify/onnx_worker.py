"""The process that runs an ONNX model: it has ONNX Runtime, but neither torch nor the exporter nor any model source.

A session is arrays here: what a call makes of the state comes out of its model, and goes into the next call.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exportkit.child.messages import Message, serve
from exportkit.verify.commands import (
    ArtifactLoaded,
    CallModel,
    CloseSession,
    ForkSession,
    LoadOnnx,
    ModelCalled,
    OpenSession,
    ReadState,
    ResetSession,
    SessionReady,
    SpoilState,
    StoreSession,
)
from exportkit.verify.filled_memory import filled_memory
from exportkit.verify.replay_worker import EXPORTER, BlockedImports

if TYPE_CHECKING:
    from exportkit.onnx.onnx_session import Bits, OnnxSession
    from exportkit.package.archive import PackageReader


class OnnxReplay:
    """The loaded ONNX models of all methods, and sessions."""

    def __init__(self) -> None:
        self._models: dict[str, OnnxSession] = {}
        self._sidecar: PackageReader | None = None
        self._sizes: dict[int, dict[str, int]] = {}
        self._states: dict[int, list[Bits]] = {}  # by session, in the manifest's order

    @property
    def _reader(self) -> PackageReader:
        assert self._sidecar is not None
        return self._sidecar

    def load(self, command: LoadOnnx) -> ArtifactLoaded:
        """Loads the models.

        Raises:
            OnnxFileError: The sidecar or a model was changed.
        """
        sys.meta_path.insert(0, BlockedImports([EXPORTER, "torch", *command.blocked]))
        from exportkit.errors import OnnxFileError
        from exportkit.onnx.interface import Interface
        from exportkit.onnx.onnx_session import OnnxSession, import_onnxruntime
        from exportkit.package.archive import PackageReader

        import_onnxruntime()
        start = time.perf_counter()
        self._sidecar = PackageReader(Path(command.sidecar))
        manifest = self._reader.manifest
        if self._reader.manifest_sha256 != command.manifest_sha256:
            raise OnnxFileError(f"{self._reader.path.name} was changed while it was verified")
        version = ""
        for onnx in manifest.onnx:
            interface = Interface.of(manifest.method(onnx.method), manifest.state)
            session = OnnxSession(Path(command.models[onnx.method]), onnx, interface)
            self._models[onnx.method], version = session, session.version
        return ArtifactLoaded("cpu", version, time.perf_counter() - start)

    def run(self, command: CallModel) -> ModelCalled:
        """Calls a model. An ONNX model returns a flat list, so the structure is the manifest's."""
        import msgspec

        from exportkit.onnx.tensor_files import read_tensors, write_tensors
        from exportkit.package.case_files import result_keys, results_of

        method = self._reader.manifest.method(command.method)
        call, number = method.call, command.number
        names = [f"{number}.input.{i}" for i in range(len(call.inputs))]
        tensors = read_tensors(Path(command.inputs), names)
        inputs = [tensors[name] for name in names]
        if command.session is not None:
            inputs += [self._states[command.session][use.index] for use in method.state]
        start = time.perf_counter()
        with filled_memory(command.memory):
            outputs = self._models[method.name].run(inputs)
        seconds = time.perf_counter() - start
        results, keys = results_of(call), result_keys(number, call)
        if command.session is not None:
            written = [use.index for use in method.state if use.written]
            for index, new in zip(written, outputs[len(results) :]):
                self._states[command.session][index] = new
        write_tensors(Path(command.outputs), {keys[each.name]: value for each, value in zip(results, outputs)})
        return ModelCalled(seconds, msgspec.json.encode(call.result).decode())

    def open(self, command: OpenSession) -> SessionReady:
        """Opens a session."""
        self._sizes[command.session] = command.sizes
        self._states[command.session] = self._new(command.sizes)
        return SessionReady()

    def fork(self, command: ForkSession) -> SessionReady:
        """Copies a session."""
        self._sizes[command.copy] = self._sizes[command.session]
        self._states[command.copy] = [_copy(each) for each in self._states[command.session]]
        return SessionReady()

    def reset(self, command: ResetSession) -> SessionReady:
        """Gives a session the state that a new one has."""
        self._states[command.session] = self._new(self._sizes[command.session])
        return SessionReady()

    def store(self, command: StoreSession) -> SessionReady:
        """Writes a session's state to a file, or reads it from one."""
        from exportkit.onnx.tensor_files import read_tensors, write_tensors

        names = [each.name for each in self._reader.manifest.state]
        if command.load:
            read = read_tensors(Path(command.file), names)
            self._states[command.session] = [read[name] for name in names]
        else:
            write_tensors(Path(command.file), dict(zip(names, self._states[command.session])))
        return SessionReady()

    def spoil(self, command: SpoilState) -> SessionReady:
        """Changes each element of the state, where it is: who shares its memory is seen then."""
        from exportkit.onnx.onnx_session import Bits

        spoilt = []
        for each in self._states[command.session]:
            changed = each.array.copy()
            if each.array.flags.writeable:
                changed = each.array
            changed[...] = changed ^ 1
            spoilt.append(Bits(each.dtype, changed))
        self._states[command.session] = spoilt
        return SessionReady()

    def read(self, command: ReadState) -> SessionReady:
        """Writes a session's state to a file, as a case names it."""
        from exportkit.onnx.tensor_files import write_tensors
        from exportkit.package.case_files import state_keys

        keys = state_keys(self._reader.manifest.state).values()
        write_tensors(Path(command.file), dict(zip(keys, self._states[command.session])))
        return SessionReady()

    def close(self, command: CloseSession) -> SessionReady:
        """Closes a session."""
        del self._states[command.session], self._sizes[command.session]
        return SessionReady()

    def _new(self, sizes: dict[str, int]) -> list[Bits]:
        """Returns the state that a new session begins with."""
        import numpy as np

        from exportkit.onnx.onnx_session import Bits, bits_type
        from exportkit.sizes import shape_at

        found = []
        for state in self._reader.manifest.state:
            kind, shape = np.dtype(bits_type(state.dtype)), shape_at(state, sizes)
            array = np.zeros(shape, kind)
            if state.initial is not None:
                rows = [size if isinstance(size, int) else 1 for size in state.shape]
                array[...] = np.frombuffer(self._reader.read(state.initial), kind).reshape(rows)
            found.append(Bits(state.dtype, array))
        return found


def _copy(tensor: Bits) -> Bits:
    return type(tensor)(tensor.dtype, tensor.array.copy())


def main(connection: socket.socket) -> None:
    """Serves the commands of the parent."""
    replay = OnnxReplay()
    handlers: dict[type[Message], Callable[[Any], Message]] = {
        LoadOnnx: replay.load,
        CallModel: replay.run,
        OpenSession: replay.open,
        ForkSession: replay.fork,
        ResetSession: replay.reset,
        StoreSession: replay.store,
        SpoilState: replay.spoil,
        ReadState: replay.read,
        CloseSession: replay.close,
    }
    serve(connection, handlers)
