"""The protocol's parameters, which HTTP and gRPC share: of a request, of an input, and of an output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exportkit.serve.protocol.datatypes import BINARY_ONLY, shown
from exportkit.serve.protocol.inference import InferRequest, InputTensor, SequenceStep
from exportkit.serve.statuses import BadRequestError, NotOfferedError

_MOST = (1 << 64) - 1  # the protocol's numbers are uint64
_MICROSECOND = 1e-6
_MOST_TENSORS = 1024  # in a request, of each kind
_MOST_ID = 128  # characters, as Triton has it

SEQUENCE_ID = "x-session-id"
"""The HTTP header that repeats the sequence's id, for proxies, which cannot read it."""


@dataclass(frozen=True)
class OutputForm:
    """The form in which an output is returned: as binary data, or as JSON."""

    binary: bool


@dataclass(frozen=True)
class OutputForms:
    """The form of each output. `default` is for those that the request does not name."""

    default: OutputForm
    named: Mapping[str, OutputForm]

    def of(self, name: str) -> OutputForm:
        """Returns the form of an output."""
        return self.named.get(name, self.default)


def whole_number(where: str, parameters: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Returns a parameter that is a whole number from 0 to 2^64 - 1; `where` says of what, for the error.

    Raises:
        BadRequestError: The parameter is something else.
    """
    value = parameters.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise BadRequestError(f"the parameter `{key}` of {where} is not a whole number from 0 to {_MOST}")
    return value


def truth(where: str, parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    """Returns a parameter that is true or false; `where` says of what, for the error.

    Raises:
        BadRequestError: The parameter is something else.
    """
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise BadRequestError(f"the parameter `{key}` of {where} is neither true nor false")
    return value


def check_not_shared(name: str, parameters: Mapping[str, Any]) -> None:
    """Raises NotOfferedError if the parameters of the tensor `name` say that it lies in shared memory."""
    if any(key.startswith("shared_memory_") for key in parameters):
        raise NotOfferedError(
            f"the tensor {shown(name)} is to lie in shared memory, which this server does not offer",
            hint="Send its data. Triton's server has shared memory.",
        )


def output_form(name: str, parameters: Mapping[str, Any], default: OutputForm) -> OutputForm:
    """Returns the form that the parameters of a requested output ask for. Unknown parameters are ignored.

    Raises:
        BadRequestError: A value is wrong.
        NotOfferedError: `classification` or shared memory is asked for.
    """
    where = f"the output {shown(name)}"
    if whole_number(where, parameters, "classification"):
        raise NotOfferedError(
            f"the output {shown(name)} is asked for with `classification`, which this server does not offer",
            hint="Leave the parameter out, and sort the output at the client.",
        )
    check_not_shared(name, parameters)
    return OutputForm(truth(where, parameters, "binary_data", default.binary))


def check_form(name: str, datatype: str, form: OutputForm) -> None:
    """Raises BadRequestError if an output of this datatype cannot be returned in this form."""
    if datatype in BINARY_ONLY and not form.binary:
        raise BadRequestError(
            f"the output {shown(name)} is {datatype}, which cannot be returned as JSON",
            hint="Ask for it with the parameter `binary_data`: true, or for all with `binary_data_output`: true.",
        )


@dataclass(frozen=True)
class Scheduling:
    """When a request runs, and which method: the fields of InferRequest."""

    priority: int
    timeout: float | None
    sequence: SequenceStep | None
    method: str | None

    def request(
        self, inputs: tuple[InputTensor, ...], outputs: Sequence[str], id: str, seconds_left: float | None = None
    ) -> InferRequest:
        """Returns the request for these outputs (none: all). Of its timeout and its call's, the sooner counts."""
        limits = [seconds for seconds in (self.timeout, seconds_left) if seconds is not None]
        timeout = min(limits, default=None)
        return InferRequest(inputs, tuple(outputs) or None, id, self.priority, timeout, self.sequence, self.method)


def scheduling(parameters: Mapping[str, Any]) -> Scheduling:
    """Returns the priority, the timeout, the sequence and the method that a request's parameters ask for.

    Custom parameters are ignored.

    Raises:
        BadRequestError: A parameter's value is wrong, or its name is reserved.
    """
    for key in parameters:
        if key.startswith("triton_") or key == "headers":
            raise BadRequestError(f"the parameter {shown(key)} has a reserved name; custom ones need another")
    timeout = whole_number("the request", parameters, "timeout")
    priority = whole_number("the request", parameters, "priority")
    seconds = timeout * _MICROSECOND if timeout else None
    return Scheduling(priority, seconds, _sequence(parameters), _method(parameters))


def _method(parameters: Mapping[str, Any]) -> str | None:
    if "method" not in parameters:
        return None
    given = parameters["method"]
    if not isinstance(given, str) or not given:
        raise BadRequestError("the parameter `method` of the request is not the name of a method")
    return given


def _sequence(parameters: Mapping[str, Any]) -> SequenceStep | None:
    """Returns the step of a sequence. An id of 0 or of no characters is none, as Triton has it."""
    where = "the request"
    given = parameters.get("sequence_id", 0)
    flags = {key: truth(where, parameters, key, False) for key in ("sequence_start", "sequence_end")}
    if isinstance(given, str) and len(given) > _MOST_ID:
        raise BadRequestError(f"the parameter `sequence_id` has {len(given)} characters; {_MOST_ID} are allowed")
    sequence_id = given if isinstance(given, str) else whole_number(where, parameters, "sequence_id")
    adapter = parameters.get("adapter")
    if adapter is not None and not (isinstance(adapter, str) and flags["sequence_start"]):
        raise BadRequestError(
            "the parameter `adapter` is not a name, or not in the first request of a sequence",
            hint="Send it with `sequence_start`: true.",
        )
    if sequence_id:
        return SequenceStep(sequence_id, flags["sequence_start"], flags["sequence_end"], adapter=adapter)
    if any(flags.values()):
        raise BadRequestError(
            "a sequence begins or ends with this request, which has no `sequence_id`",
            hint="It is a number from 1 on, or a text.",
        )
    return None


def check_names(kind: str, names: Sequence[str]) -> None:
    """Raises BadRequestError if a name is empty or there twice, or there are more than a model can have."""
    if len(names) > _MOST_TENSORS:
        raise BadRequestError(f"the request has {len(names)} {kind}s; at most {_MOST_TENSORS} are allowed")
    seen: set[str] = set()
    for name in names:
        if not name:
            raise BadRequestError(f"an {kind} has an empty name")
        if name in seen:
            raise BadRequestError(f"there are two {kind}s {shown(name)}; each {kind} is given once")
        seen.add(name)
