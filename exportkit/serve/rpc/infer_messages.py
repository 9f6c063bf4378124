"""Reads ModelInferRequest and writes ModelInferResponse. The bytes of tensors are not copied by protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from exportkit.serve.protocol.datatypes import shown
from exportkit.serve.protocol.inference import InferRequest, InputTensor, OutputTensor
from exportkit.serve.protocol.parameters import (
    OutputForm,
    Scheduling,
    check_names,
    check_not_shared,
    output_form,
    scheduling,
)
from exportkit.serve.protocol.tensors import LONG, TensorSpec
from exportkit.serve.rpc.message_classes import message_class, read_message
from exportkit.serve.rpc.wire import Data, field_head, split
from exportkit.serve.statuses import BadRequestError

_REQUEST = message_class("inference.ModelInferRequest")
_INPUT = message_class("inference.ModelInferRequest.InferInputTensor")
_CONTENTS = message_class("inference.InferTensorContents")
_RESPONSE = message_class("inference.ModelInferResponse")
_INPUTS: int = _REQUEST.INPUTS_FIELD_NUMBER
_TYPED_INPUT: int = _INPUT.CONTENTS_FIELD_NUMBER
_RAW_INPUTS: int = _REQUEST.RAW_INPUT_CONTENTS_FIELD_NUMBER
_ANSWER_ID: int = _RESPONSE.ID_FIELD_NUMBER
_RAW_OUTPUTS: int = _RESPONSE.RAW_OUTPUT_CONTENTS_FIELD_NUMBER

# More than any model needs. A short message could otherwise become millions of objects.
_MOST_FIELDS = 4096
_MOST_INPUTS = 1024
_MOST_FIELDS_OF_AN_INPUT = 256
_MOST_BYTES = 256 << 10  # of names, datatypes, shapes and parameters

# The field of InferTensorContents of each datatype. There is none for 16-bit floats.
_TYPED: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


class ReceivedRequest:
    """A ModelInferRequest.

    Attributes:
        model: The name of the model that is asked.
        version: Its version; empty: the newest.
        size: The bytes of the inputs, as their shapes say.
        method: The method of the package that is asked; None: the one that the model's name says.
        is_step: Whether it is a step of a sequence.
        long: Whether `request` needs so long that it should be called in another thread.
    """

    def __init__(self, data: bytes | bytearray) -> None:
        """Reads a message, but not the elements of its inputs.

        Raises:
            BadRequestError: The bytes are not such a message, or it breaks the protocol.
            NotOfferedError: It asks for a part of the protocol that is not offered.
        """
        described, self._raw = split(data, _RAW_INPUTS, _MOST_FIELDS)
        self._head = head = _read_head(described, len(self._raw))
        self.model, self.version = head.model, head.version
        self.size, self.method = head.size, head.scheduling.method
        # In another thread, a step of a sequence could be read later than the one behind it in its stream.
        self.is_step = head.scheduling.sequence is not None
        self.long = head.work > LONG and not self.is_step

    def request(self, seconds_left: float | None) -> InferRequest:
        """Returns the request, whose inputs do not need the message any more.

        Args:
            seconds_left: Seconds until the deadline of the call. None: it has none.

        Raises:
            BadRequestError: The request breaks the protocol.
            NotOfferedError: It asks for a part of the protocol that is not offered.
        """
        head = self._head
        when = head.scheduling
        limits = [seconds for seconds in (when.timeout, seconds_left) if seconds is not None]
        return InferRequest(
            tuple([source.tensor(self._raw) for source in head.sources]),
            head.outputs,
            head.id,
            when.priority,
            min(limits, default=None),
            when.sequence,
            when.method,
        )


def encode_outputs(model: str, version: str, request_id: str, outputs: Sequence[OutputTensor]) -> bytes:
    """Returns the ModelInferResponse with these outputs, which are copied once."""
    described = tuple([(output.name, output.datatype, output.shape) for output in outputs])
    before, behind = _described(model, version, described)
    parts: list[bytes | memoryview] = [before]
    if request_id:
        encoded = request_id.encode()
        parts += (field_head(_ANSWER_ID, len(encoded)), encoded)
    parts.append(behind)
    for output in outputs:
        parts += (field_head(_RAW_OUTPUTS, output.data.nbytes), output.data)
    return b"".join(parts)


@lru_cache(1024)
def _described(model: str, version: str, outputs: tuple[tuple[str, str, Sequence[int]], ...]) -> tuple[bytes, bytes]:
    """Returns what stands before the id of an answer, and what stands between it and the elements."""
    described = _RESPONSE()
    for name, datatype, shape in outputs:
        described.outputs.add(name=name, datatype=datatype, shape=shape)
    return (
        bytes(_RESPONSE(model_name=model, model_version=version).SerializeToString()),
        bytes(described.SerializeToString()),
    )


def plain_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a message's parameters. One without a value is None."""
    kinds = {name: parameter.WhichOneof("parameter_choice") for name, parameter in parameters.items()}
    return {name: getattr(parameters[name], kind) if kind else None for name, kind in kinds.items()}


@dataclass(frozen=True)
class _Head:
    """What a message says but for the elements in `raw_input_contents`."""

    model: str
    version: str
    id: str
    sources: tuple[_Source, ...]
    outputs: tuple[str, ...] | None
    scheduling: Scheduling
    size: int
    work: int


def _read_head(described: Data, raw: int) -> _Head:
    """Reads a message without its `raw_input_contents`, of which there are so many."""
    head, inputs = split(described, _INPUTS, _MOST_FIELDS)
    message = read_message(_REQUEST, _plain(head))
    sources = tuple(_sources(inputs, raw, _MOST_BYTES - len(head)))
    check_names("input", (source.spec.name for source in sources))
    check_names("output", (output.name for output in message.outputs))
    for output in message.outputs:
        output_form(output.name, plain_parameters(output.parameters), OutputForm(binary=True))
    return _Head(
        message.model_name,
        message.model_version,
        message.id,
        sources,
        tuple(output.name for output in message.outputs) or None,
        scheduling(plain_parameters(message.parameters)),
        sum(source.spec.size for source in sources),
        sum(len(source.typed) for source in sources),
    )


@dataclass(frozen=True)
class _Source:
    """An input, and where its elements are: in `contents` (`typed`) or `raw_input_contents` (`place`)."""

    spec: TensorSpec
    typed: bytes
    place: int | None

    def tensor(self, raw: Sequence[memoryview]) -> InputTensor:
        """Returns the input with its data."""
        return self.spec.of_values(self._values()) if self.place is None else self.spec.of_bytes(raw[self.place])

    def _values(self) -> Sequence[Any]:
        name, datatype = self.spec.name, self.spec.datatype
        if datatype not in _TYPED:
            raise BadRequestError(
                f"the input `{name}` is {datatype}, for which `contents` has no field",
                hint="Send its bytes in `raw_input_contents`.",
            )
        contents = read_message(_CONTENTS, self.typed)
        for field, _ in contents.ListFields():
            if field.name != _TYPED[datatype]:
                raise BadRequestError(
                    f"the elements of the input `{name}`, which is {datatype}, are in `{field.name}`",
                    hint=f"Put them into `{_TYPED[datatype]}`, or their bytes into `raw_input_contents`.",
                )
        values: Sequence[Any] = getattr(contents, _TYPED[datatype])
        return values


def _plain(data: Data, allowed: int = _MOST_BYTES) -> bytes:
    """Returns a part of the message that is no tensor."""
    if len(data) > allowed:
        raise BadRequestError(f"names, shapes and parameters have more than {_MOST_BYTES} bytes")
    return bytes(data)


def _sources(messages: Sequence[memoryview], raw: int, allowed: int) -> list[_Source]:
    """Reads the inputs, whose messages have at most `allowed` bytes beside `contents`, and finds their elements.

    There are `raw` elsewhere, in the order of the inputs.
    """
    if len(messages) > _MOST_INPUTS:
        raise BadRequestError(f"the request has {len(messages)} inputs; {_MOST_INPUTS} are allowed")
    sources = []
    for place, message in enumerate(messages):
        head, contents = split(message, _TYPED_INPUT, _MOST_FIELDS_OF_AN_INPUT)
        described = read_message(_INPUT, _plain(head, allowed))
        allowed -= len(head)
        spec = TensorSpec.of(described.name, described.datatype, described.shape)
        check_not_shared(spec.name, plain_parameters(described.parameters))
        if raw and contents:
            raise BadRequestError(
                f"the input {shown(spec.name)} has `contents`, and the request has `raw_input_contents`",
                hint="Send the elements of all inputs in the same of the two.",
            )
        sources.append(_Source(spec, b"".join(contents), place if raw else None))
    if raw not in (0, len(sources)):
        raise BadRequestError(f"the request has {raw} `raw_input_contents` for {len(sources)} inputs")
    return sources
