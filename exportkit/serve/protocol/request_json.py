"""The JSON of an inference request, as typed structures.

A short text can stand for many objects in memory. So what has no bound in the protocol gets one here, and a key that is
there twice is refused as soon as it is read.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from exportkit.serve.protocol.datatypes import shortened, shown
from exportkit.serve.statuses import BadRequestError

_MOST_TENSORS = 1024  # in a request
_MOST_TEXT = 1 << 20  # bytes of the JSON of parameters, and of requested outputs

T = TypeVar("T")


class RequestedInput(Struct, forbid_unknown_fields=True):
    """An input. Its parameters and its data are not decoded yet."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Raw = Raw()
    data: Raw = Raw()

    @property
    def values(self) -> memoryview | None:
        """The JSON of the values. None: they are not given as JSON."""
        return None if _is_missing(self.data) else memoryview(self.data)


class RequestedOutput(Struct, forbid_unknown_fields=True):
    """An output that is asked for."""

    name: str
    parameters: Raw = Raw()


class RequestJson(Struct, forbid_unknown_fields=True):
    """A request. KServe's client repeats the model's name and version, which the URL has already."""

    inputs: Raw
    outputs: Raw = Raw()
    id: str | None = None
    parameters: Raw = Raw()
    model_name: str | None = None
    model_version: str | None = None


class _Key(str):
    """A key of a JSON object. A dict compares it with a key that is there already, which raises."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if str.__eq__(self, other):
            raise ValueError(f"the key {shown(str(self))} is there twice")
        return False


def read_request(text: memoryview) -> RequestJson:
    """Returns a request.

    Raises:
        BadRequestError: The text is not JSON, a key is missing, unknown or there twice, or a value has another type.
    """
    request = _decoded(_REQUEST, text, "the request")
    # Another reader, such as a proxy, could have seen another of two values than this one.
    _decoded(_OBJECT, text, "the request")
    return request


def read_inputs(request: RequestJson) -> list[RequestedInput]:
    """Returns the inputs.

    Raises:
        BadRequestError: As `read_request`.
    """
    return _tensors(_INPUTS, request.inputs, "inputs")


def read_outputs(request: RequestJson) -> list[RequestedOutput]:
    """Returns the outputs that are asked for; none: all.

    Raises:
        BadRequestError: As `read_request`.
    """
    return [] if _is_missing(request.outputs) else _tensors(_OUTPUTS, _bounded(request.outputs, "outputs"), "outputs")


def read_parameters(parameters: Raw, whose: str) -> dict[str, Any]:
    """Returns parameters, by their names. `whose` says of what, for the error.

    Raises:
        BadRequestError: The JSON is not an object, or a key is there twice.
    """
    if _is_missing(parameters):
        return {}
    where = f"parameters of {whose}"
    decoded = _decoded(_PARAMETERS, _bounded(parameters, where), f"the {where}")
    return {str(key): value for key, value in decoded.items()}


def _tensors(decoder: msgspec.json.Decoder[list[T]], text: Raw, what: str) -> list[T]:
    tensors = _decoded(decoder, text, f"the {what}")
    if len(tensors) > _MOST_TENSORS:
        raise BadRequestError(f"the request has {len(tensors)} {what}; at most {_MOST_TENSORS} are allowed")
    _decoded(_OBJECTS, text, f"the {what}")
    return tensors


def _decoded(decoder: msgspec.json.Decoder[T], text: memoryview | Raw, where: str) -> T:
    try:
        return decoder.decode(text)
    # RecursionError: lists in lists in lists. UnicodeDecodeError is a ValueError, as msgspec's errors are.
    except (ValueError, RecursionError) as error:
        hint = "A request is an object with `inputs`, and may have `outputs`, `parameters` and `id`."
        if "malformed" in str(error) and _NOT_JSON.search(text):
            hint = "JSON has neither NaN nor infinity. Send the input as binary data, with `binary_data_size`."
        raise BadRequestError(
            f"the request's JSON cannot be read: {shortened(error)} (in {where})", hint=hint
        ) from None


def _is_missing(text: Raw) -> bool:
    return bytes(memoryview(text)[:5]) in (b"", b"null")


def _bounded(text: Raw, what: str) -> Raw:
    length = memoryview(text).nbytes
    if length > _MOST_TEXT:
        raise BadRequestError(f"the JSON of the {what} has {length} bytes; at most {_MOST_TEXT} are allowed")
    return text


def _key(_: type, text: str) -> Any:
    return _Key(text)


_NOT_JSON = re.compile(rb"\b(NaN|Infinity)\b")
_REQUEST = msgspec.json.Decoder(RequestJson)
_INPUTS = msgspec.json.Decoder(list[RequestedInput])
_OUTPUTS = msgspec.json.Decoder(list[RequestedOutput])
_OBJECT = msgspec.json.Decoder(dict[_Key, Raw], dec_hook=_key)
_OBJECTS = msgspec.json.Decoder(list[dict[_Key, Raw]], dec_hook=_key)
_PARAMETERS = msgspec.json.Decoder(dict[_Key, Any], dec_hook=_key)
