"""What a receiver and the server say to each other. Nothing is pickled.

A request for an inference has a number. The receiver asks for room before it reads the body (`AdmissionRequest`), is
told whether there is any (`AdmissionAnswer`), and sends the request (`Submission`). Each question is answered once, by
what it asks for or by `Refused`. Requests and answers are the protocol's own; the bytes of tensors are left out of
them, and lie in the receiver's memory or behind the message.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import msgspec

from exportkit.serve import statuses
from exportkit.serve.operations.observation import Outcome
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, Natural, SequenceStart, SequenceStep
from exportkit.serve.request_record import Failure
from exportkit.serve.serve_options import ServeOptions
from exportkit.serve.statuses import ServeError


class ReceiverMessage(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A message. A frame may have bytes behind it: a body, or the outputs of an answer."""


# --- from the receiver ------------------------------------------------------------------------------------------------


class AdmissionRequest(ReceiverMessage, frozen=True):
    """Asks for a model (an empty version: the newest), and for room for a body of `size` bytes of a client."""

    number: Natural
    model: str
    version: str
    size: Natural
    client: str = ""


class GrowRequest(ReceiverMessage, frozen=True):
    """Asks for room for `size` more bytes of a body whose size was not known."""

    number: Natural
    size: Natural


class StartRequest(ReceiverMessage, frozen=True):
    """Asks whether a sequence can begin, before its tensors are read."""

    number: Natural
    start: SequenceStart


class GiveUp(ReceiverMessage, frozen=True):
    """The answer to a step cannot be written: its sequence ends. Nothing answers this message."""

    model: str
    version: str
    step: SequenceStep


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes of the receiver's memory."""

    offset: Natural
    size: Natural


class Submission(ReceiverMessage, frozen=True):
    """The request for which there was room. `places` has the bytes of each of its inputs."""

    number: Natural
    request: InferRequest
    places: tuple[Place, ...]


class Cancel(ReceiverMessage, frozen=True):
    """Gives the room back. A request that was sent is cancelled, and answered with `Refused`."""

    number: Natural


class Forward(ReceiverMessage, frozen=True):
    """A request for anything else. The bytes behind it are its body."""

    number: Natural
    scope: dict[str, Any]
    headers: list[tuple[bytes, bytes]]
    request_id: str
    client: str = ""


class Listening(ReceiverMessage, frozen=True):
    """Connections are answered from now on."""


class Counted(ReceiverMessage, frozen=True):
    """What became of requests since the last message.

    Attributes:
        outcomes: Each with how often it was.
        in_flight: The requests that are not over.
        closed: The connections that were taken and are closed.
        lines_lost: The lines of the access log that were lost.
        asked: Whether it answers `Count`.
    """

    outcomes: list[tuple[Outcome, Natural]]
    in_flight: Natural
    closed: Natural
    lines_lost: Natural
    asked: bool


FromReceiver = (
    Listening | AdmissionRequest | GrowRequest | StartRequest | Submission | Cancel | GiveUp | Forward | Counted
)

# --- to the receiver --------------------------------------------------------------------------------------------------


class Setup(ReceiverMessage, frozen=True):
    """The first message. Two open files come with it: the memory of bodies, and the socket of new connections.

    Attributes:
        options: The server's.
        connections: The most connections that this receiver may have.
        open_paths: The paths that need no API key.
    """

    options: ServeOptions
    connections: int
    open_paths: tuple[str, ...]


class Grown(ReceiverMessage, frozen=True):
    """There is room for more, or for a sequence."""

    number: int


class Answered(ReceiverMessage, frozen=True):
    """The model's answer. The inputs are not read any more. `sizes` are those of the outputs, which lie behind it."""

    number: int
    answer: InferAnswer
    sizes: tuple[int, ...]


class Refused(ReceiverMessage, frozen=True):
    """Why there is no answer. `InputsReleased` follows if the model may still read the inputs.

    Attributes:
        number: The request.
        kind: The name of a class of `exportkit.serve.statuses`. Empty: something failed that should not.
        message: The error's message; the traceback of what should not have failed.
        hint: The error's hint.
        reads: Whether the model may still read the inputs.
        retry_after: That of the error.
    """

    number: int
    kind: str
    message: str
    hint: str | None
    reads: bool
    retry_after: int | None = None

    @classmethod
    def of(cls, number: int, error: BaseException, *, reads: bool = False) -> Refused:
        """Describes an error."""
        if isinstance(error, ServeError) and hasattr(statuses, type(error).__name__):
            return cls(number, type(error).__name__, error.message, error.hint, reads, error.retry_after)
        return cls(number, "", "".join(traceback.format_exception(error)), None, reads)

    def error(self) -> Exception:
        """Returns the error again."""
        if not self.kind:
            return FailedThereError(self.message)
        error: ServeError = getattr(statuses, self.kind)(self.message, hint=self.hint)
        error.retry_after = self.retry_after
        return error


class AdmissionAnswer(ReceiverMessage, frozen=True):
    """The model, and the room that there is for a request.

    Attributes:
        number: The request.
        model, version: The model.
        serial: The number of its load.
        rules: The rules of this load; None: the receiver knows them.
        refused: Why there is no room; None: there is.
    """

    number: int
    model: str
    version: str
    serial: int
    rules: BodyRules | None
    refused: Refused | None


class InputsReleased(ReceiverMessage, frozen=True):
    """The inputs of a request that was refused are not read any more."""

    number: int


class Forwarded(ReceiverMessage, frozen=True):
    """The answer to `Forward`. The bytes behind it are its body."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    failure: Failure | None


class Drain(ReceiverMessage, frozen=True):
    """Every answer closes its connection from now on."""


class Count(ReceiverMessage, frozen=True):
    """Asks for `Counted`, which comes from time to time without it."""


class ReloadKeys(ReceiverMessage, frozen=True):
    """The file of API keys has changed."""


class Stop(ReceiverMessage, frozen=True):
    """Everything was answered: send what is not sent yet, and end."""


ToAsker = AdmissionAnswer | Grown | Answered | Refused | InputsReleased | Forwarded
ToReceiver = ToAsker | Drain | Count | ReloadKeys | Stop


class FailedThereError(Exception):
    """Something failed in the process that has the models. The message is the traceback."""


def _to_plain(value: Any) -> bytes:
    if isinstance(value, Path):
        return os.fsencode(value)  # a file's name need not be UTF-8
    raise NotImplementedError(f"a message has a {type(value).__name__}")  # as msgspec wants it of its hooks


def _from_plain(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(os.fsdecode(value))
    raise NotImplementedError(f"a message has a {kind.__name__}")  # msgspec wants this error here, too


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)


def encode(message: ReceiverMessage) -> bytes:
    """Returns a message as bytes."""
    return _ENCODER.encode(message)


def decoder(types: Any) -> msgspec.msgpack.Decoder[Any]:
    """Returns what reads the messages of these types."""
    return msgspec.msgpack.Decoder(types, dec_hook=_from_plain)
