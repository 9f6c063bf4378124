"""The child process of `exportkit.onnx.trial`."""

from __future__ import annotations

import socket

from exportkit.child.messages import serve
from exportkit.errors import HostError
from exportkit.onnx.trial import Load, Loaded


def load(command: Load) -> Loaded:
    """Checks and loads a model.

    Raises:
        HostError: onnx or ONNX Runtime cannot be imported.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise HostError(str(error)) from error
    onnx.checker.check_model(command.path, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    onnxruntime.InferenceSession(command.path, options, providers=["CPUExecutionProvider"])
    return Loaded()


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    serve(connection, {Load: load})
