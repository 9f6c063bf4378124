"""The process that runs an ONNX model: it has ONNX Runtime, but neither torch nor the exporter nor any model source.

A session is arrays here: what a call makes of the state comes out of its model, and goes into the next call.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from exportkit.child.messages import serve
from exportkit.verify.commands import ArtifactLoaded, CallModel, LoadOnnx, ModelCalled, SessionReady, UseSession
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

    def use(self, command: UseSession) -> SessionReady:
        """Does something with a session."""
        from exportkit.onnx.tensor_files import read_tensors, write_tensors
        from exportkit.package.case_files import state_keys

        sizes, states, number = self._sizes, self._states, command.session
        described, file = self._reader.manifest.state, Path(command.file)
        names = [each.name for each in described]
        match command.do:
            case "open":
                sizes[number], states[number] = command.sizes, self._new(command.sizes)
            case "fork":
                sizes[command.copy], states[command.copy] = sizes[number], [_copy(each) for each in states[number]]
            case "reset":
                states[number] = self._new(sizes[number])
            case "spoil":
                states[number] = [_spoilt(each) for each in states[number]]
            case "save":
                write_tensors(file, dict(zip(names, states[number])))
            case "load":
                read = read_tensors(file, names)
                states[number] = [read[name] for name in names]
            case "read":
                write_tensors(file, dict(zip(state_keys(described).values(), states[number])))
            case "close":
                del states[number], sizes[number]
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


def _spoilt(tensor: Bits) -> Bits:
    """Changes each element of a state, where it is: who shares its memory is seen then."""
    changed = tensor.array if tensor.array.flags.writeable else tensor.array.copy()
    changed[...] = changed ^ 1
    return type(tensor)(tensor.dtype, changed)


def main(connection: socket.socket) -> None:
    """Serves the commands of the parent."""
    replay = OnnxReplay()
    serve(connection, {LoadOnnx: replay.load, CallModel: replay.run, UseSession: replay.use})
