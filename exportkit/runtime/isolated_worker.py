"""The worker process of a package that was loaded with `isolate=True`.

The first socket receives more sockets. Each of these carries one call at a time.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading

import torch

from exportkit.child.messages import Failed
from exportkit.runtime.isolated_messages import (
    AccessState,
    Capture,
    CloseSessions,
    Connect,
    LoadPackage,
    MakeSession,
    PackageLoaded,
    Question,
    Ran,
    ReportGraphs,
    Run,
    RunRequests,
    Swap,
    TorchSettings,
    TryRows,
)
from exportkit.runtime.loader import load
from exportkit.runtime.model import Model
from exportkit.runtime.state import LocalState, empty_state
from exportkit.runtime.tensor_socket import TensorSocket

_Calls = TensorSocket[Question]


def main(connection: socket.socket) -> None:
    """Loads the package and serves calls until the parent closes the connection."""
    control: TensorSocket[LoadPackage | Connect] = TensorSocket(connection, LoadPackage | Connect)
    try:
        message, _, descriptor = control.receive()
        assert isinstance(message, LoadPackage)
        try:
            message.settings.apply()
            model = _loaded(message, descriptor)
        except Exception as error:
            control.send(Failed.of(error))
            return
        control.send(PackageLoaded(model.target.name, str(model.device), model._reader.manifest_sha256))
        served = _Served(model)
        while True:
            _, _, descriptor = control.receive()
            assert descriptor is not None
            calls: _Calls = TensorSocket(socket.socket(fileno=descriptor), Question)
            threading.Thread(target=_serve, args=(served, calls, message.settings), daemon=True).start()
    except ConnectionError:
        # The parent closed the connection. It removes the unpacked files, and it does not wait for running calls.
        os._exit(0)


def _loaded(message: LoadPackage, descriptor: int | None) -> Model:
    source = message.path if descriptor is None else descriptor
    assert source is not None
    options = message.options if message.signature is None else {**message.options, "signature": message.signature}
    try:
        return load(source, **options)
    finally:
        if descriptor is not None:
            os.close(descriptor)  # the model has its own


def _serve(served: _Served, calls: _Calls, settings: TorchSettings) -> None:
    """Answers one call after another until the parent closes the socket."""
    torch.set_num_threads(settings.threads)  # OpenMP keeps the number for each thread
    served.model.use_own_stream()
    try:
        while True:
            message, tensors, _ = calls.receive()
            try:
                calls.send(*served.answer(message, tensors))
            except ConnectionError:
                raise
            except Exception as error:
                calls.send(Failed.of(error))
    except ConnectionError:
        calls.close()


_Answer = tuple[Ran, list[torch.Tensor]]


class _Served:
    """The model, and the state of its sessions by number. The parent has one caller for each session."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._sessions: dict[int, LocalState] = {}
        self._numbers = itertools.count()

    def answer(self, message: Question, tensors: list[torch.Tensor]) -> _Answer:
        """Does what a message asks for."""
        if isinstance(message, Run):
            return self._run(message, tensors)
        if isinstance(message, RunRequests):
            return self._run_requests(message, tensors)
        if isinstance(message, TryRows):
            return Ran(rows=self.model.try_rows(message.method, message.most)), []
        if isinstance(message, Swap):
            self.model.swap_weights(dict(zip(message.names, tensors)) if message.path is None else message.path)
            return Ran(), []
        code = self.model._code
        if isinstance(message, ReportGraphs):
            return Ran(report=code.runner(message.method).graph_report()), []
        if isinstance(message, Capture):
            inputs, state = self._moved(tensors), empty_state(code.plans[message.method], message.sizes)
            owned = code.runner(message.method).capture(inputs + state, len(inputs))
            return Ran(graphs=owned is not None), []
        return self._answer_session(message, tensors)

    def _answer_session(
        self, message: MakeSession | AccessState | CloseSessions, tensors: list[torch.Tensor]
    ) -> _Answer:
        model = self.model
        if isinstance(message, MakeSession):
            if message.copy_of is not None:
                made = self._sessions[message.copy_of].fork()
            else:
                made = LocalState.new(model._code, model._state, message.sizes)
            number = next(self._numbers)
            self._sessions[number] = made
            return Ran(session=number), []
        if isinstance(message, CloseSessions):
            for number in message.sessions:
                del self._sessions[number]
            return Ran(), []
        state = self._sessions[message.session]
        if message.use == "read":
            return Ran(), list(state.tensors().values())
        if message.use == "write":
            state.replace(dict(zip(message.names, tensors)), message.row)
        else:
            state.reset()
        return Ran(), []

    def _run(self, message: Run, tensors: list[torch.Tensor]) -> _Answer:
        plan, inputs = self.model._code.plans[message.method], self._moved(tensors)
        for place in plan.inputs.written:  # the parent's memory shall not change before the call has ended well
            inputs[place] = inputs[place].clone()
        if message.session is None:
            outputs = self.model._code.runner(plan.name).run(inputs)
            self.model.synchronize()
        else:
            state = self._sessions[message.session]
            outputs = state.run(plan, inputs)
            self.model.synchronize()
            if (refused := state.refused()) is not None:
                raise refused[1]
        return Ran(), outputs + [inputs[place] for place in plan.inputs.written]

    def _run_requests(self, message: RunRequests, tensors: list[torch.Tensor]) -> _Answer:
        width = len(tensors) // message.requests
        requests = [tensors[place * width : (place + 1) * width] for place in range(message.requests)]
        answers = self.model._code.runner(message.method).run_requests(requests, message.outputs)
        return Ran((answers.input_seconds, answers.run_seconds, answers.output_seconds)), answers.outputs

    def _moved(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self.model.device) for tensor in tensors]
