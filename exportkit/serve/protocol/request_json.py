"""The JSON of an inference request, as typed structures."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw, Struct

from exportkit.serve.protocol.datatypes import shortened, shown
from exportkit.serve.statuses import BadRequestError


class RequestedInput(Struct, forbid_unknown_fields=True):
    """An input. `data` is JSON that is not decoded yet."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] | None = None
    data: Raw = Raw()

    @property
    def values(self) -> memoryview | None:
        """The JSON of the values. None: they are not given as JSON."""
        text = memoryview(self.data)
        return None if bytes(text[:5]) in (b"", b"null") else text


class RequestedOutput(Struct, forbid_unknown_fields=True):
    """An output that is asked for."""

    name: str
    parameters: dict[str, Any] | None = None


class RequestJson(Struct, forbid_unknown_fields=True):
    """A request. KServe's client repeats the model's name and version, which the URL has already."""

    inputs: list[RequestedInput]
    outputs: list[RequestedOutput] | None = None
    id: str | None = None
    parameters: dict[str, Any] | None = None
    model_name: Any = None
    model_version: Any = None


class _Key(str):
    """A key of a JSON object. No two are equal, so that a dict keeps a key that is there twice."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def read_request(text: memoryview) -> RequestJson:
    """Returns a request.

    Raises:
        BadRequestError: The text is not JSON, a key is missing, unknown or there twice, or a value has another type.
    """
    try:
        request = _REQUEST.decode(text)
        _refuse_duplicates(text)
    # RecursionError: lists in lists in lists. UnicodeDecodeError is a ValueError, as msgspec's errors are.
    except (ValueError, RecursionError) as error:
        hint = "It is an object with `inputs`, and may have `outputs`, `parameters` and `id`."
        if "malformed" in str(error) and _NOT_JSON.search(text):
            hint = "JSON has neither NaN nor infinity. Send the input as binary data, with `binary_data_size`."
        raise BadRequestError(f"the request's JSON cannot be read: {shortened(error)}", hint=hint) from None
    return request


def _refuse_duplicates(text: memoryview) -> None:
    """Refuses keys that are there twice. Another reader, such as a proxy, could have seen another value than we."""
    request = _members(_OBJECT.decode(text), "the request")
    for kind in ("input", "output"):
        for number, pairs in enumerate(_OBJECTS.decode(request.get(kind + "s", _NULL)) or ()):
            tensor = _members(pairs, f"{kind} {number}")
            _members(_OBJECT.decode(tensor.get("parameters", _NULL)) or {}, f"the parameters of {kind} {number}")
    _members(_OBJECT.decode(request.get("parameters", _NULL)) or {}, "the request's parameters")


def _members(pairs: dict[_Key, Raw] | None, where: str) -> dict[str, Raw]:
    members: dict[str, Raw] = {}
    for key, value in (pairs or {}).items():
        if str(key) in members:
            raise ValueError(f"the key {shown(str(key))} is there twice in {where}")
        members[str(key)] = value
    return members


def _key(_: type, text: str) -> Any:
    return _Key(text)


_NOT_JSON = re.compile(rb"\b(NaN|Infinity)\b")
_NULL = Raw(b"null")
_REQUEST = msgspec.json.Decoder(RequestJson)
_OBJECT = msgspec.json.Decoder(dict[_Key, Raw] | None, dec_hook=_key)
_OBJECTS = msgspec.json.Decoder(list[dict[_Key, Raw]] | None, dec_hook=_key)
