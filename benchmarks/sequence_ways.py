"""Steps of sequences by tritonclient: over HTTP, over gRPC, and in a stream of gRPC."""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

_SECONDS = 60.0  # for an answer, in which nothing else takes so long


class Refused(Exception):
    """A step has no answer. `text` says why."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Way(ABC):
    """A connection of one client."""

    _protocol: Any

    def __init__(self, model: str, ports: tuple[int, int]) -> None:
        """`ports` are those of HTTP and gRPC."""
        self._model = model
        self._address = f"127.0.0.1:{ports[self._protocol is tritonclient.grpc]}"
        self._client = self._protocol.InferenceServerClient(self._address)

    def ask(
        self,
        inputs: Mapping[str, torch.Tensor],
        sequence: Any,
        *,
        start: bool = False,
        end: bool = False,
        timeout: int | None = None,
    ) -> torch.Tensor:
        """Returns a step's first output. Raises Refused. `timeout` is in microseconds."""
        which = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end, "timeout": timeout}
        try:
            answer = self._answer(self._given(inputs), which)
        except InferenceServerException as error:
            raise Refused(str(error.message())) from None
        return _first(answer)

    def _answer(self, given: list[Any], which: Mapping[str, Any]) -> Any:
        return self._client.infer(self._model, given, **which)

    @abstractmethod
    def send_and_leave(self, inputs: Mapping[str, torch.Tensor], sequence: Any) -> None:
        """Sends a step and goes away before its answer."""

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def _given(self, inputs: Mapping[str, torch.Tensor]) -> list[Any]:
        found = []
        for name, tensor in inputs.items():
            given = self._protocol.InferInput(name, list(tensor.shape), "FP32")
            given.set_data_from_numpy(tensor.numpy())
            found.append(given)
        return found


class Http(Way):
    """Over HTTP."""

    _protocol = tritonclient.http

    def send_and_leave(self, inputs: Mapping[str, torch.Tensor], sequence: Any) -> None:
        """See Way: a timeout that ends the connection."""
        short = tritonclient.http.InferenceServerClient(self._address, network_timeout=0.001)
        with contextlib.suppress(Exception):  # the client raises plain exceptions here, and leaving is the point
            short.infer(self._model, self._given(inputs), sequence_id=sequence)
        short.close()


class Grpc(Way):
    """Over gRPC, each step by itself."""

    _protocol = tritonclient.grpc

    def send_and_leave(self, inputs: Mapping[str, torch.Tensor], sequence: Any) -> None:
        """See Way: a call that is cancelled."""
        call = self._client.async_infer(
            self._model, self._given(inputs), lambda result, error: None, sequence_id=sequence
        )
        call.cancel()


class Stream(Way):
    """In a stream of gRPC."""

    _protocol = tritonclient.grpc

    def __init__(self, model: str, ports: tuple[int, int]) -> None:
        super().__init__(model, ports)
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._start()

    def _start(self) -> None:
        answers = self._answers = queue.Queue()
        self._client.start_stream(lambda result, error: answers.put((result, error)))

    def _answer(self, given: list[Any], which: Mapping[str, Any]) -> Any:
        self._client.async_stream_infer(self._model, given, **which)
        result, error = self._answers.get(timeout=_SECONDS)
        if error is not None:
            raise error
        return result

    def send_and_leave(self, inputs: Mapping[str, torch.Tensor], sequence: Any) -> None:
        """See Way: the stream is cancelled, and another one begun."""
        self._client.async_stream_infer(self._model, self._given(inputs), sequence_id=sequence)
        self._client.stop_stream(cancel_requests=True)
        self._start()

    def close(self) -> None:
        """See Way."""
        self._client.stop_stream()
        super().close()


def _first(answer: Any) -> torch.Tensor:
    response = answer.get_response()
    outputs = response["outputs"] if isinstance(response, dict) else response.outputs
    name = outputs[0]["name"] if isinstance(response, dict) else outputs[0].name
    return torch.from_numpy(answer.as_numpy(name).copy())


WAYS: tuple[type[Way], ...] = (Http, Grpc, Stream)
