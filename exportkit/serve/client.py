"""A client that repeats a request until it is answered or its deadline passes. Does not import torch.

Inference changes nothing, so a request may be sent again when nobody knows whether it was answered: after a lost
connection, and after an error of a proxy whose server died. The steps of a `ClientSequence` change its state, and are
not. tritonclient works as well, and repeats nothing.

Headers tell proxies to which replica a step belongs: `x-session-id` has the sequence's id, on which they can hash, and
`x-session-replica` is what the last answer had there: the replica's name, from proxies that give it one.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self
from urllib.parse import quote

import msgspec
import numpy as np
import urllib3

from exportkit.errors import UsageError
from exportkit.serve.protocol.datatypes import datatype_of, dtype_of
from exportkit.serve.protocol.parameters import SEQUENCE_ID, SEQUENCE_START
from exportkit.serve.statuses import BackendError, DeadlineError, SequenceError, ServeError

_HEADER_LENGTH = "Inference-Header-Content-Length"
_REPLICA_HEADER = "x-session-replica"
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0  # seconds between two attempts, unless the server asks for more


class Client:
    """Sends inferences over HTTP. Threads may share it."""

    def __init__(
        self,
        url: str,
        *,
        deadline: float = 60.0,
        api_key: str | None = None,
        authorities: str | None = None,
        connections: int = 16,
        max_answer_bytes: int = 1 << 30,
    ) -> None:
        """Connects when the first request is sent.

        Args:
            url: The server, such as `http://127.0.0.1:8000`.
            deadline: Seconds within which a request must be answered, all attempts and waits included.
            api_key: The server's API key.
            authorities: A PEM file with the authorities that sign the server's certificate. Default: the system's.
            connections: The most connections that stay open for further requests.
            max_answer_bytes: The most bytes of an answer, inflated. A larger one is refused before it fills the memory.
        """
        self._url = url.rstrip("/")
        self._deadline = deadline
        self._max_answer_bytes = max_answer_bytes
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._pool = urllib3.PoolManager(maxsize=connections, retries=False, ca_certs=authorities)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        *,
        method: str | None = None,
        version: str = "",
        outputs: Sequence[str] | None = None,
        deadline: float | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the outputs by name. The arrays share the answer's memory and are read-only.

        The server is told the deadline, so that it does not compute what nobody waits for.

        Args:
            model: The model's name.
            inputs: The inputs by name. bfloat16 is ml_dtypes' dtype.
            method: The method of the package that `model` names. Default: the default one.
            version: The model's version. Default: the newest.
            outputs: The outputs that are wanted. Default: all.
            deadline: Seconds for this request, in place of the client's.

        Raises:
            DeadlineError: No attempt was answered in time. The message has the last reason.
            ServeError: The server refuses the request, or its answer is too large; sending it again would not help. The
                class says why.
            UsageError: An input has a dtype that the protocol does not know.
        """
        return self._asked(model, inputs, method=method, version=version, outputs=outputs, deadline=deadline)

    def sequence(
        self, model: str, sequence_id: int | str | None = None, *, version: str = "", restart: bool = False
    ) -> ClientSequence:
        """Returns a sequence of requests, whose state the server keeps. It begins with its first request.

        Args:
            model: The model that is asked unless a request names another method.
            sequence_id: A number from 1 on, or a text, that no other sequence has. Default: a random one.
            version: The model's version. Default: the newest.
            restart: Whether a sequence that was lost begins again, without its state, with the request that found out.
                Default: the request raises a SequenceError.
        """
        return ClientSequence(self, model, sequence_id, version=version, restart=restart)

    def _asked(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        *,
        method: str | None = None,
        version: str = "",
        outputs: Sequence[str] | None = None,
        deadline: float | None = None,
        step: _Step | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the outputs. `step` is a step of a sequence, which never runs twice."""
        path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
        given = self._deadline if deadline is None else deadline
        end = time.monotonic() + given
        more: dict[str, Any] = {} if method is None else {"method": method}
        reason: str = "the deadline had passed"
        attempt = 0
        while (left := end - time.monotonic()) > 0:
            body, headers = _encoded(inputs, outputs, left, more if step is None else more | step.parameters())
            if step is not None:
                headers |= step.headers()
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.0)
            attempt += 1
            try:
                answer = self._pool.request(
                    "POST",
                    self._url + path,
                    body=body,
                    headers=headers | self._headers,
                    timeout=urllib3.Timeout(total=left),
                    redirect=False,
                    preload_content=False,
                )
                content = _received(answer, self._max_answer_bytes)
            except urllib3.exceptions.HTTPError as error:
                reason = str(error)
                if step is not None and not isinstance(error, urllib3.exceptions.NewConnectionError):
                    step.may_have_run(reason)
            else:
                if answer.status == 200:
                    if step is not None:
                        step.answered(answer)
                    return _decoded(answer, content)
                message = _message(content)
                failure = _failure(answer, content, message)
                if step is not None and isinstance(failure, DeadlineError):
                    step.may_have_run(failure.message)
                if failure is not None:
                    raise failure
                reason = _status_line(answer, content)
                # Envoy says 503 of its own as well where a server was lost after it got the request.
                if step is not None and (message is None or answer.status not in (429, 503)):
                    step.may_have_run(reason)
                wait = max(wait, _retry_after(answer))
            if wait >= end - time.monotonic():
                break
            time.sleep(wait)
        raise DeadlineError(f"{self._url}{path} did not answer within {given:g} s, in {attempt} attempts: {reason}")

    def close(self) -> None:
        """Closes the connections."""
        self._pool.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ClientSequence:
    """Requests that a server answers with one state. One thread uses it.

    A step is sent again only if the server says that it did not run it (429, 503), or was not reached. If the server
    has no such sequence any more, or nobody knows whether a step ran, the sequence is lost: it begins again if
    `restart` says so, and else refuses further steps. A first step has no state to lose, and is sent until it is
    answered, as other requests are.

    Attributes:
        id: Its id. Whenever it begins again it has another one: a replica that could not be reached may still have
            state under the old one, and must never be asked for it.
        restarts: How often it began again.
    """

    def __init__(
        self, client: Client, model: str, sequence_id: int | str | None, *, version: str = "", restart: bool = False
    ) -> None:
        """Nothing is sent yet. Use `Client.sequence`."""
        self.id = secrets.token_hex(16) if sequence_id is None else sequence_id
        self.restarts = 0
        self._client = client
        self._model = model
        self._version = version
        self._restart = restart
        self._first_id = self.id
        self._replica: str | None = None  # what the last answer's header said
        self._begins = True  # with the next step
        self._lost: str | None = None  # why

    def infer(
        self,
        inputs: Mapping[str, np.ndarray],
        *,
        model: str | None = None,
        method: str | None = None,
        outputs: Sequence[str] | None = None,
        end: bool = False,
        deadline: float | None = None,
    ) -> dict[str, np.ndarray]:
        """Sends the next step, and returns the outputs by name.

        Args:
            inputs: The inputs by name.
            model: Another name to ask than the sequence's, such as `notes.ask`.
            method: A method of the package, such as `ask` of `notes`.
            outputs: The outputs that are wanted. Default: all.
            end: Whether the sequence ends with this step.
            deadline: Seconds for this step, in place of the client's.

        Raises:
            SequenceError: The sequence is lost.
            BackendError: The model failed, and the sequence is lost.
            ServeError, UsageError: As for `Client.infer`. Nothing was changed.
        """
        asked = partial(self._sent, self._model if model is None else model, inputs, method, outputs, deadline, end=end)
        try:
            return asked()
        except SequenceError:
            if not self._restart:
                raise
        self.restarts += 1
        self._begins, self._lost = True, None
        self._rename()
        return asked()

    def _sent(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        method: str | None,
        outputs: Sequence[str] | None,
        deadline: float | None,
        *,
        end: bool,
    ) -> dict[str, np.ndarray]:
        if self._lost is not None:
            raise SequenceError(self._lost, hint="Make another one, or say `restart=True`.")
        step = _Step(self, end=end)
        try:
            found = self._client._asked(
                model, inputs, method=method, version=self._version, outputs=outputs, deadline=deadline, step=step
            )
        except (SequenceError, BackendError) as error:
            self._lost = f"the sequence is lost: {error.message}"
            raise
        self._begins = False
        if end:
            self._lost = "the sequence has ended"
        return found

    def _rename(self) -> None:
        first = str(self._first_id)[:100]  # servers take 128 characters
        self.id, self._replica = f"{first}~{secrets.token_hex(8)}", None


class _Step:
    """A step of a sequence, as it is sent."""

    def __init__(self, sequence: ClientSequence, *, end: bool) -> None:
        self._sequence = sequence
        self._end = end

    def parameters(self) -> dict[str, Any]:
        """Returns the request's parameters."""
        begins = self._sequence._begins
        return {"sequence_id": self._sequence.id, "sequence_start": begins, "sequence_end": self._end}

    def headers(self) -> dict[str, str]:
        """Returns the headers that bring it to its replica, and let the server refuse it before it reads the body."""
        replica = self._sequence._replica
        found = {SEQUENCE_ID: quote(str(self._sequence.id))} | ({_REPLICA_HEADER: replica} if replica else {})
        return found | ({SEQUENCE_START: "true"} if self._sequence._begins else {})

    def answered(self, answer: urllib3.BaseHTTPResponse) -> None:
        """Remembers the replica that answered. Envoy names it only where it is another one than the request said."""
        self._sequence._replica = answer.headers.get(_REPLICA_HEADER, self._sequence._replica)

    def may_have_run(self, reason: str) -> None:
        """Nobody knows whether it ran. Raises SequenceError, unless it is a first step, which begins under a new id."""
        if not self._sequence._begins:
            raise SequenceError(f"nobody knows whether the step ran: {reason}", hint="Begin the sequence again.")
        self._sequence._rename()


def _encoded(
    inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None, left: float, more: Mapping[str, Any]
) -> tuple[bytes, dict[str, str]]:
    """Returns a body with binary tensors, and its headers."""
    described, binary = [], []
    for name, value in inputs.items():
        array = np.asarray(value)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        try:
            datatype = datatype_of(array.dtype.name)
        except ServeError as error:
            raise UsageError(f"the input {name!r} is {array.dtype}", hint=error.message) from error
        size = {"binary_data_size": array.nbytes}
        described.append({"name": name, "datatype": datatype, "shape": array.shape, "parameters": size})
        binary.append(array.tobytes())
    request: dict[str, Any] = {
        "inputs": described,
        "parameters": {"binary_data_output": True, "timeout": max(1, int(left * 1e6)), **more},
    }
    if outputs is not None:
        request["outputs"] = [{"name": name} for name in outputs]
    header = msgspec.json.encode(request)
    headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(header))}
    return b"".join([header, *binary]), headers


def _received(answer: urllib3.BaseHTTPResponse, most: int) -> bytes:
    """Returns the content of an answer, of at most so many bytes."""
    length = answer.headers.get("Content-Length", "")
    # Without a length it may be endless, and a coded one can inflate to anything.
    plain = length.isdecimal() and len(length) < 19 and "Content-Encoding" not in answer.headers
    content = answer.read() if plain and int(length) <= most else answer.read(most + 1)
    if len(content) > most:
        answer.close()
        raise BackendError(f"the answer has more than {most} bytes", hint="Client(max_answer_bytes=...) allows more.")
    answer.release_conn()
    return content


def _decoded(answer: urllib3.BaseHTTPResponse, content: bytes) -> dict[str, np.ndarray]:
    """Returns the tensors of an answer."""
    body = memoryview(content)
    try:
        length = int(answer.headers.get(_HEADER_LENGTH, len(body)))
        offset, found = length, {}
        for output in msgspec.json.decode(body[:length])["outputs"]:
            dtype = _numpy_dtype(output["datatype"])
            if "data" in output:
                array = np.array(output["data"], dtype)
            else:
                end = offset + output["parameters"]["binary_data_size"]
                array, offset = np.frombuffer(body[offset:end], dtype), end
            found[output["name"]] = array.reshape(output["shape"])
        return found
    except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise BackendError(f"the answer is not of the Open Inference Protocol: {error}") from error


def _numpy_dtype(datatype: str) -> np.dtype:
    if datatype != "BF16":
        return np.dtype(dtype_of(datatype))
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise UsageError("an output is BF16, which numpy lacks", hint="`pip install ml_dtypes`.") from None
    return np.dtype(bfloat16)


def _status_line(answer: urllib3.BaseHTTPResponse, content: bytes) -> str:
    return f"status {answer.status}: {content[:200].decode(errors='replace')}"


def _message(content: bytes) -> str | None:
    """Returns what a server of the protocol says of an error; None: a proxy in front of it speaks."""
    try:
        return str(msgspec.json.decode(content)["error"])
    except (KeyError, TypeError, msgspec.DecodeError):
        return None


def _failure(answer: urllib3.BaseHTTPResponse, content: bytes, message: str | None) -> ServeError | None:
    """Returns the error that sending the request again would not mend; None: it may."""
    if answer.status in (429, 503) or (message is None and answer.status >= 500):
        return None
    kind = next((kind for kind in ServeError.__subclasses__() if kind.status == answer.status), ServeError)
    return kind(_status_line(answer, content) if message is None else message)


def _retry_after(answer: urllib3.BaseHTTPResponse) -> float:
    """Returns the seconds that the server asks to wait. A date, which servers of models do not send, is not read."""
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0.0
