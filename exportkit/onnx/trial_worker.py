"""The child process of `exportkit.onnx.trial`, whose imports would take most of the child's time."""

from __future__ import annotations

import socket

from exportkit.child.messages import Message, serve
from exportkit.errors import HostError


class TryModel(Message, frozen=True):
    """Asks the child to check a model and to load it. The answer is TrialPassed."""

    path: str


class TrialPassed(Message, frozen=True):
    """The model is valid ONNX, and ONNX Runtime took it."""


def load(command: TryModel) -> TrialPassed:
    """Checks and loads a model. HostError: onnx or ONNX Runtime cannot be imported."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise HostError(str(error)) from error
    onnx.checker.check_model(command.path, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    onnxruntime.InferenceSession(command.path, options, providers=["CPUExecutionProvider"])
    return TrialPassed()


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    serve(connection, {TryModel: load})
