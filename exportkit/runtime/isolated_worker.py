"""The worker process of a package that was loaded with `isolate=True`.

The first socket receives more sockets. Each of these carries one call at a time.
"""

from __future__ import annotations

import os
import socket
import threading

import torch

from exportkit.child.messages import Failed
from exportkit.runtime.isolated_messages import (
    Capture,
    Connect,
    LoadPackage,
    PackageLoaded,
    Question,
    Ran,
    ReportGraphs,
    Run,
    Swap,
    TorchSettings,
)
from exportkit.runtime.loader import load
from exportkit.runtime.model import Model
from exportkit.runtime.tensor_socket import TensorSocket

_Calls = TensorSocket[Question]


def main(connection: socket.socket) -> None:
    """Loads the package and serves calls until the parent closes the connection."""
    control: TensorSocket[LoadPackage | Connect] = TensorSocket(connection, LoadPackage | Connect)
    try:
        message, _, _ = control.receive()
        assert isinstance(message, LoadPackage)
        try:
            message.settings.apply()
            model = load(message.path, **message.options)
        except Exception as error:
            control.send(Failed.of(error))
            return
        control.send(PackageLoaded(model.target.name, str(model.device), model._reader.manifest_sha256))
        while True:
            _, _, descriptor = control.receive()
            assert descriptor is not None
            calls: _Calls = TensorSocket(socket.socket(fileno=descriptor), Question)
            threading.Thread(target=_serve, args=(model, calls, message.settings), daemon=True).start()
    except ConnectionError:
        # The parent closed the connection. It removes the unpacked files, and it does not wait for running calls.
        os._exit(0)


def _serve(model: Model, calls: _Calls, settings: TorchSettings) -> None:
    """Answers one call after another until the parent closes the socket."""
    torch.set_num_threads(settings.threads)  # OpenMP keeps the number for each thread
    model.use_own_stream()
    try:
        while True:
            message, tensors, _ = calls.receive()
            try:
                calls.send(*_answer(model, message, tensors))
            except ConnectionError:
                raise
            except Exception as error:
                calls.send(Failed.of(error))
    except ConnectionError:
        calls.close()


def _answer(model: Model, message: Question, tensors: list[torch.Tensor]) -> tuple[Ran, list[torch.Tensor]]:
    if isinstance(message, Swap):
        model.swap_weights(dict(zip(message.names, tensors)) if message.path is None else message.path)
        return Ran(), []
    runner = model._runner
    assert runner is not None
    if isinstance(message, ReportGraphs):
        return Ran(report=runner.graph_report()), []
    if isinstance(message, (Run, Capture)):
        inputs = [tensor.to(model.device) for tensor in tensors]
        if isinstance(message, Run):
            return Ran(), runner.run(inputs)
        return Ran(graphs=runner.capture(inputs) is not None), []
    width = len(tensors) // message.requests
    requests = [tensors[place * width : (place + 1) * width] for place in range(message.requests)]
    answers = runner.run_requests(requests, message.outputs)
    return Ran((answers.input_seconds, answers.run_seconds, answers.output_seconds)), answers.outputs
