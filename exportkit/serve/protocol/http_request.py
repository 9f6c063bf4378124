"""Reads the body of an HTTP request for an inference: JSON, JSON before binary data, or one tensor's bytes.

A short text can stand for many objects in memory. So what has no bound in the protocol gets one here, and a key that is
there twice is refused as soon as it is read.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from exportkit.serve.protocol.datatypes import item_size, shortened, shown
from exportkit.serve.protocol.inference import InferRequest, InputTensor
from exportkit.serve.protocol.parameters import (
    OutputForm,
    OutputForms,
    check_form,
    check_names,
    check_not_shared,
    output_form,
    scheduling,
    truth,
    whole_number,
)
from exportkit.serve.protocol.tensors import TensorSpec, aligned_bytes
from exportkit.serve.statuses import BadRequestError, TooLargeError

HEADER_LENGTH = "Inference-Header-Content-Length"

_MOST_DIGITS = 18  # what fits 64 bits; int() would be slow for very many
_MOST_TEXT = 1 << 20  # bytes of the JSON of parameters, and of requested outputs

T = TypeVar("T")
Described = TypeVar("Described", "_Input", "_Output")


@dataclass(frozen=True)
class BodyRules:
    """What a body of a model may hold.

    Attributes:
        inputs: `name`, `datatype` and `shape` of each of the model's inputs. A size of -1 varies.
        outputs: The same of its outputs.
        batched: Whether the first size of the inputs is a number of rows: then a request without JSON has one row,
            unless no other size varies.
        max_bytes: The most bytes that the inputs may have together.
        name: The name of the model that answers.
        methods: The rules of each method that the parameter `method` may name.
    """

    inputs: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]
    batched: bool
    max_bytes: int
    name: str = ""
    methods: Mapping[str, BodyRules] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: Mapping[str, Any], max_bytes: int) -> BodyRules:
        """Returns the rules of a model with this metadata."""
        inputs, outputs, batched = metadata["inputs"], metadata["outputs"], metadata["batching"]["enabled"]
        return cls(inputs, outputs, batched, max_bytes, metadata["name"])

    def of_method(self, method: str | None) -> BodyRules:
        """Returns the rules of the method that a request names. The model refuses one that it does not have."""
        return self if method is None else self.methods.get(method, self)

    @functools.cached_property
    def largest(self) -> tuple[int, int]:
        """The most bytes and the most elements that the inputs may have together, of any method."""
        meant = tuple(self.methods.values()) or (self,)
        sizes = [min((item_size(tensor["datatype"]) for tensor in each.inputs), default=1) for each in meant]
        most = max(each.max_bytes // size for each, size in zip(meant, sizes))
        return max(each.max_bytes for each in meant), most


@dataclass(frozen=True)
class ParsedBody:
    """A request, the name of the model that answers it, and how its answer is to be written."""

    request: InferRequest
    forms: OutputForms
    model: str = ""


def header_length_of(value: str | None) -> int | None:
    """Returns the number in the HTTP header Inference-Header-Content-Length. None: there is no such header.

    Raises:
        BadRequestError: It is not a number of at most 18 digits.
    """
    hint = "It is the length of the JSON, in digits. 0 says that the body is the data of the only input."
    return None if value is None else number_of_bytes(HEADER_LENGTH, value, hint)


def number_of_bytes(header: str, value: str, hint: str | None = None) -> int:
    """Returns the number in an HTTP header.

    Raises:
        BadRequestError: It is not a number of at most 18 digits.
    """
    if not (value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS):
        raise BadRequestError(f"the header {header} is {shown(value)}, which is not a number of bytes", hint=hint)
    return int(value)


def body_buffer(content_length: int, header_length: int | None) -> memoryview:
    """Returns the memory into which a body is to be written, so that its binary section needs no copy.

    Args:
        content_length: The bytes of the body, decompressed.
        header_length: What `header_length_of` returned.

    Raises:
        BadRequestError: The header is longer than the body.
    """
    _check_header_length(content_length, header_length)
    return aligned_bytes(content_length, header_length or 0)


def _check_header_length(content_length: int, header_length: int | None) -> None:
    """Raises BadRequestError if the JSON cannot be that long."""
    if header_length is not None and header_length > content_length:
        raise BadRequestError(
            f"the header Inference-Header-Content-Length is {header_length}, and the body has {content_length} bytes",
            hint="It is the length of the JSON, which is at most the length of the (decompressed) body.",
        )


def parse_body(body: memoryview, header_length: int | None, rules: BodyRules) -> ParsedBody:
    """Reads a body. The inputs are views of it, so it must not be written to again.

    Args:
        body: The whole body, decompressed; best in a `body_buffer`.
        header_length: The length of the JSON. None: all is JSON. 0: all is the one input's data.
        rules: What the model allows.

    Raises:
        BadRequestError: The body breaks the protocol. The message names the key or the input.
        NotOfferedError: It asks for a part of the protocol that is not offered.
        TooLargeError: Its inputs are larger than those of any request of the model.
    """
    _check_header_length(body.nbytes, header_length)
    if header_length == 0:
        return _without_json(body, rules)
    text = body if header_length is None else body[:header_length]
    message = _decoded(_REQUEST, text, "the request")
    # Another reader, such as a proxy, could have seen another of two values than this one. A decoder of structures
    # takes the last of them, so each object is read once more for its keys.
    _decoded(_OBJECT, text, "the request")
    parameters = _parameters(message.parameters, "the request")
    when = scheduling(parameters)
    rules = rules.of_method(when.method)
    forms = _forms(message.outputs, OutputForm(truth("the request", parameters, "binary_data_output", False)))
    _check_forms(forms, rules.outputs)
    tensors = _tensors(_INPUTS, message.inputs, "input")
    inputs = _take_inputs(tensors, body[text.nbytes :], header_length, rules.max_bytes)
    return ParsedBody(when.request(inputs, tuple(forms.named), message.id or ""), forms, rules.name)


def _without_json(body: memoryview, rules: BodyRules) -> ParsedBody:
    """Returns the request of a body that is the data of the model's only input."""
    inputs = rules.inputs
    if rules.methods and not inputs:  # a package without a default method, which refuses what names none
        return ParsedBody(InferRequest(()), OutputForms(OutputForm(binary=True), {}), rules.name)
    if len(inputs) != 1:
        names = ", ".join(str(described["name"]) for described in inputs)
        raise BadRequestError(
            f"the header {HEADER_LENGTH} is 0, which is for models of one input; this has {len(inputs)}: {names}",
            hint=f"Send JSON before the data, and its length as {HEADER_LENGTH}.",
        )
    name, datatype, shape = inputs[0]["name"], inputs[0]["datatype"], list(inputs[0]["shape"])
    varying = [place for place, length in enumerate(shape) if length < 0]
    if rules.batched and len(varying) > 1 and varying[0] == 0:
        shape[0], varying = 1, varying[1:]
    if len(varying) > 1:
        raise BadRequestError(
            f"the header {HEADER_LENGTH} is 0, which is for inputs of which at most one size varies; "
            f"the input {shown(name)} has the shape {inputs[0]['shape']}",
            hint=f"Send JSON before the data, and its length as {HEADER_LENGTH}.",
        )
    for place in varying:
        each = math.prod(length for length in shape if length >= 0) * item_size(datatype)
        shape[place] = body.nbytes // each if each else 0
    request = InferRequest((TensorSpec.of(name, datatype, shape).of_bytes(body),))
    return ParsedBody(request, OutputForms(OutputForm(binary=True), {}), rules.name)


def _forms(outputs: Raw, default: OutputForm) -> OutputForms:
    """Returns the forms of the outputs that are asked for."""
    forms = {}
    if not _is_missing(outputs):
        for output in _tensors(_OUTPUTS, _bounded(outputs, "outputs"), "output"):
            wanted = _parameters(output.parameters, f"the output {shown(output.name)}")
            forms[output.name] = output_form(output.name, wanted, default)
    return OutputForms(default, forms)


def _check_forms(forms: OutputForms, outputs: Sequence[Mapping[str, Any]]) -> None:
    """Refuses before the model runs what could not be written after it."""
    for output in outputs:
        name = output["name"]
        if not forms.named or name in forms.named:
            check_form(name, output["datatype"], forms.of(name))


def _take_inputs(
    tensors: Sequence[_Input], section: memoryview, header_length: int | None, max_bytes: int
) -> tuple[InputTensor, ...]:
    """Returns the inputs with their data, of which the binary section has nothing else."""
    inputs, room, start = [], max_bytes, 0
    for tensor in tensors:
        spec = _spec(tensor)
        room -= spec.size
        if room < 0:
            raise TooLargeError(
                f"the inputs have more than {max_bytes} bytes with {shown(spec.name)} of shape {list(spec.shape)}; no "
                "request of this model needs more",
                hint="Send fewer rows at a time; `exportkit inspect` of the package says which sizes it takes.",
            )
        if not _is_missing(tensor.data):
            inputs.append(spec.of_json(memoryview(tensor.data)))
        elif spec.size > section.nbytes - start:
            raise BadRequestError(
                f"the input {shown(spec.name)} has {spec.size} bytes of binary data; "
                f"{section.nbytes - start} are left in the body",
                hint=f"{HEADER_LENGTH} says how long the JSON is."
                if header_length is not None
                else f"The request has no header {HEADER_LENGTH}, so all of its body is JSON.",
            )
        else:
            inputs.append(spec.of_bytes(section[start : start + spec.size]))
            start += spec.size
    if start != section.nbytes:
        raise BadRequestError(
            f"the binary data is {section.nbytes - start} bytes longer than its inputs",
            hint=f"The `binary_data_size` of the inputs and {HEADER_LENGTH} add up to the length of the body.",
        )
    return tuple(inputs)


def _spec(tensor: _Input) -> TensorSpec:
    """Returns what is said of an input, whose data is either in the JSON or in the binary section."""
    whose = f"the input {shown(tensor.name)}"
    parameters = _parameters(tensor.parameters, whose)
    check_not_shared(tensor.name, parameters)
    missing = _is_missing(tensor.data)
    if ("binary_data_size" in parameters) != missing:
        raise BadRequestError(
            f"{whose} has " + ("no data" if missing else "its data in two places"),
            hint="Give one of `data` and the parameter `binary_data_size`.",
        )
    spec = TensorSpec.of(tensor.name, tensor.datatype, tensor.shape)
    if missing:
        spec.check_size(whole_number(whose, parameters, "binary_data_size"))
    return spec


# --- the JSON ---------------------------------------------------------------------------------------------------------


class _Input(Struct, forbid_unknown_fields=True):
    """An input. Its parameters and its data are not decoded yet."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Raw = Raw()
    data: Raw = Raw()


class _Output(Struct, forbid_unknown_fields=True):
    """An output that is asked for."""

    name: str
    parameters: Raw = Raw()


class _Request(Struct, forbid_unknown_fields=True):
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


def _tensors(decoder: msgspec.json.Decoder[list[Described]], text: Raw, kind: str) -> list[Described]:
    tensors = _decoded(decoder, text, f"the {kind}s")
    check_names(kind, [tensor.name for tensor in tensors])
    _decoded(_OBJECTS, text, f"the {kind}s")
    return tensors


def _parameters(parameters: Raw, whose: str) -> dict[str, Any]:
    if _is_missing(parameters):
        return {}
    where = f"parameters of {whose}"
    decoded = _decoded(_PARAMETERS, _bounded(parameters, where), f"the {where}")
    return {str(key): value for key, value in decoded.items()}


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
_REQUEST = msgspec.json.Decoder(_Request)
_INPUTS = msgspec.json.Decoder(list[_Input])
_OUTPUTS = msgspec.json.Decoder(list[_Output])
_OBJECT = msgspec.json.Decoder(dict[_Key, Raw], dec_hook=_key)
_OBJECTS = msgspec.json.Decoder(list[dict[_Key, Raw]], dec_hook=_key)
_PARAMETERS = msgspec.json.Decoder(dict[_Key, Any], dec_hook=_key)
