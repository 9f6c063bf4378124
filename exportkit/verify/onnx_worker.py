"""The process that runs an ONNX model: it has ONNX Runtime, but neither torch nor the exporter nor any model source."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from exportkit.child.messages import serve
from exportkit.verify.commands import ArtifactLoaded, CallModel, LoadOnnx, ModelCalled
from exportkit.verify.replay_worker import EXPORTER, BlockedImports

if TYPE_CHECKING:
    from exportkit.onnx.session import OnnxSession
    from exportkit.package.manifest import Call


class OnnxReplay:
    """One loaded ONNX model."""

    def __init__(self) -> None:
        self._session: OnnxSession | None = None
        self._call: Call | None = None

    def load(self, command: LoadOnnx) -> ArtifactLoaded:
        """Loads the model."""
        sys.meta_path.insert(0, BlockedImports([EXPORTER, "torch", *command.blocked]))
        from exportkit.onnx.session import OnnxSession, import_onnxruntime

        import_onnxruntime()
        start = time.perf_counter()
        self._call = command.call
        self._session = OnnxSession(Path(command.model), command.onnx, command.call)
        return ArtifactLoaded("cpu", self._session.version, time.perf_counter() - start)

    def run(self, command: CallModel) -> ModelCalled:
        """Calls the model. An ONNX model returns a flat list, so the structure is the manifest's."""
        import msgspec

        from exportkit.onnx.tensor_files import read_inputs, write_outputs

        assert self._session is not None
        assert self._call is not None
        inputs = read_inputs(Path(command.inputs), len(self._call.inputs), command.number)
        start = time.perf_counter()
        outputs = self._session.run(inputs)
        seconds = time.perf_counter() - start
        write_outputs(Path(command.outputs), outputs, command.number)
        return ModelCalled(seconds, msgspec.json.encode(self._call.result).decode())


def main(connection: socket.socket) -> None:
    """Serves the commands of the parent."""
    replay = OnnxReplay()
    serve(connection, {LoadOnnx: replay.load, CallModel: replay.run})
