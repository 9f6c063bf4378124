"""Reads the body of an HTTP request for an inference: JSON, JSON before binary data, or one tensor's bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exportkit.serve.protocol.aligned import check_header_length
from exportkit.serve.protocol.datatypes import BINARY_ONLY, item_size, shown
from exportkit.serve.protocol.inference import InferRequest, InputTensor
from exportkit.serve.protocol.parameters import OutputForm, OutputForms, checked_request
from exportkit.serve.protocol.request_head import InputHead, read_head
from exportkit.serve.protocol.shared_memory import SharedMemory, input_of_region, offered
from exportkit.serve.protocol.tensor_checks import checked_input, input_of_array, input_of_bytes
from exportkit.serve.protocol.values import array_of_json
from exportkit.serve.statuses import BadRequestError, TooLargeError

HEADER_LENGTH = "Inference-Header-Content-Length"
_MOST_DIGITS = 18  # what fits 64 bits; int() would be slow for very many


@dataclass(frozen=True)
class ParsedBody:
    """A request, and how its answer is to be written."""

    request: InferRequest
    forms: OutputForms


def header_length_of(value: str | None) -> int | None:
    """Returns the number in the HTTP header Inference-Header-Content-Length. None: there is no such header.

    Raises:
        BadRequestError: It is not a number of at most 18 digits.
    """
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS):
        raise BadRequestError(
            f"the header {HEADER_LENGTH} is {shown(value)}, which is not a number of bytes",
            hint="It is the length of the JSON, in digits. 0 says that the body is the data of the only input.",
        )
    return int(value)


@dataclass(frozen=True)
class BodyRules:
    """What a body of a model may hold.

    Attributes:
        inputs: `name`, `datatype` and `shape` of each of the model's inputs. A size of -1 varies.
        outputs: The same of its outputs.
        batched: Whether the first size of the inputs is a number of rows: then a request without JSON has one row,
            unless no other size varies.
        max_bytes: The most bytes that the inputs may have together.
    """

    inputs: Sequence[Mapping[str, Any]]
    outputs: Sequence[Mapping[str, Any]]
    batched: bool
    max_bytes: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any], max_bytes: int) -> BodyRules:
        """Returns the rules of a model with this metadata."""
        return cls(metadata["inputs"], metadata["outputs"], metadata["batching"]["enabled"], max_bytes)

    @functools.cached_property
    def most_elements(self) -> int:
        """The most elements that the inputs may have together."""
        return self.max_bytes // min((item_size(tensor["datatype"]) for tensor in self.inputs), default=1)


def parse_body(
    body: memoryview, header_length: int | None, rules: BodyRules, shared_memory: SharedMemory | None = None
) -> ParsedBody:
    """Reads a body. The inputs are views of it, so it must not be written to again.

    Args:
        body: The whole body, decompressed; best in a `body_buffer`.
        header_length: The length of the JSON. None: all is JSON. 0: all is the one input's data.
        rules: What the model allows.
        shared_memory: The registered regions. None: this server does not offer shared memory.

    Raises:
        BadRequestError: The body breaks the protocol. The message names the key or the input.
        NotOfferedError: It asks for a part of the protocol that is not offered.
        TooLargeError: Its inputs are larger than those of any request of the model.
    """
    check_header_length(body.nbytes, header_length)
    if header_length == 0:
        return _raw(body, rules)
    end = body.nbytes if header_length is None else header_length
    head = read_head(body[:end])
    _check_forms(head.forms, rules.outputs, shared_memory)
    data = _Data(body[end:], header_length, rules.max_bytes, shared_memory)
    inputs = tuple(map(data.take, head.inputs))
    data.check_end()
    return ParsedBody(replace(head.request, inputs=inputs), head.forms)


class _Data:
    """Takes the inputs out of the binary section, one after the other, out of shared memory, or out of the JSON."""

    def __init__(
        self, section: memoryview, header_length: int | None, max_bytes: int, shared_memory: SharedMemory | None
    ) -> None:
        self._section = section
        self._header_length = header_length
        self._start = 0
        self._most = self._room = max_bytes
        self._shared_memory = shared_memory

    def take(self, head: InputHead) -> InputTensor:
        """Returns an input, and goes past its data."""
        self._room -= head.size
        if self._room < 0:
            raise TooLargeError(f"the inputs have more than {self._most} bytes, which no request of this model needs")
        name, datatype, shape = head.name, head.datatype, head.shape
        if head.region is not None:
            return input_of_region(self._shared_memory, name, datatype, shape, head.region)
        if head.values is not None:
            return input_of_array(name, datatype, shape, array_of_json(name, datatype, shape, head.values))
        return input_of_bytes(name, datatype, shape, self._binary(head))

    def _binary(self, head: InputHead) -> memoryview:
        start, left = self._start, self._section.nbytes - self._start
        if head.size > left:
            raise BadRequestError(
                f"the input {shown(head.name)} has {head.size} bytes of binary data; {left} are left in the body",
                hint=f"{HEADER_LENGTH} says how long the JSON is."
                if self._header_length is not None
                else f"The request has no header {HEADER_LENGTH}, so all of its body is JSON.",
            )
        self._start += head.size
        return self._section[start : self._start]

    def check_end(self) -> None:
        """Raises BadRequestError if bytes are left."""
        left = self._section.nbytes - self._start
        if left:
            raise BadRequestError(
                f"the binary data is {left} bytes longer than its inputs",
                hint=f"The `binary_data_size` of the inputs and {HEADER_LENGTH} add up to the length of the body.",
            )


def _check_forms(forms: OutputForms, outputs: Sequence[Mapping[str, Any]], shared_memory: SharedMemory | None) -> None:
    """Refuses before the model runs what could not be written after it."""
    for form in forms.named.values():
        if form.region is not None:
            offered(shared_memory)
    for output in outputs:
        name = output["name"]
        if not forms.named or name in forms.named:
            check_form(name, output["datatype"], forms.of(name))


def check_form(name: str, datatype: str, form: OutputForm) -> None:
    """Raises BadRequestError if an output of this datatype cannot be returned in this form."""
    if datatype in BINARY_ONLY and not form.binary and form.region is None:
        raise BadRequestError(
            f"the output {shown(name)} is {datatype}, which cannot be returned as JSON",
            hint="Ask for it with the parameter `binary_data`: true, or for all with `binary_data_output`: true.",
        )


def _raw(body: memoryview, rules: BodyRules) -> ParsedBody:
    """Returns the request of a body that is the data of the model's only input."""
    inputs = rules.inputs
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
    tensor = checked_input(name, datatype, shape, body)
    return ParsedBody(checked_request([tensor], None, "", {}), OutputForms(OutputForm(True), {}))
