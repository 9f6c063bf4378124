"""Reads the body of an HTTP request for an inference: JSON, JSON before binary data, or one tensor's bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exportkit.serve.protocol.aligned import check_header_length
from exportkit.serve.protocol.datatypes import BINARY_ONLY, item_size, shown
from exportkit.serve.protocol.inference import InferRequest, InputTensor
from exportkit.serve.protocol.parameters import (
    OutputForm,
    OutputForms,
    check_names,
    checked_request,
    output_form,
    region_slice,
    truth,
    whole_number,
)
from exportkit.serve.protocol.request_json import (
    RequestedInput,
    RequestedOutput,
    read_inputs,
    read_outputs,
    read_parameters,
    read_request,
)
from exportkit.serve.protocol.shared_memory import SharedMemory, input_of_region, offered
from exportkit.serve.protocol.tensor_checks import check_data_size, checked_input, input_bytes, input_of_array
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


def parse_body(
    body: memoryview,
    header_length: int | None,
    *,
    metadata: Mapping[str, Any],
    batched: bool,
    max_bytes: int,
    shared_memory: SharedMemory | None = None,
) -> ParsedBody:
    """Reads a body. The inputs are views of it, so it must not be written to again.

    Args:
        body: The whole body, decompressed; best in a `body_buffer`.
        header_length: The length of the JSON. None: all is JSON. 0: all is the one input's data.
        metadata: `ServedModel.metadata()`, which gives the input of a request without JSON, and the outputs' datatypes.
        batched: Whether the first size of the inputs is a number of rows: then a request without JSON has one row,
            unless no other size varies.
        max_bytes: `ServedModel.max_body`: the most bytes that the inputs may have together.
        shared_memory: The registered regions. None: this server does not offer shared memory.

    Raises:
        BadRequestError: The body breaks the protocol. The message names the key or the input.
        NotOfferedError: It asks for a part of the protocol that is not offered.
        TooLargeError: Its inputs are larger than those of any request of the model.
    """
    check_header_length(body.nbytes, header_length)
    if header_length == 0:
        return _raw(body, metadata["inputs"], batched)
    end = body.nbytes if header_length is None else header_length
    message = read_request(body[:end])
    parameters = read_parameters(message.parameters, "the request")
    default = OutputForm(truth("the request", parameters, "binary_data_output", False))
    forms = _forms(read_outputs(message), default)
    names = list(forms.named)
    _check_forms(forms, names, metadata["outputs"], shared_memory)
    inputs = _Inputs(body[end:], header_length, max_bytes, shared_memory)
    tensors = [inputs.take(tensor) for tensor in read_inputs(message)]
    inputs.check_end()
    return ParsedBody(checked_request(tensors, names, message.id or "", parameters), forms)


class _Inputs:
    """Takes the inputs out of the binary section, one after the other, out of shared memory, or out of the JSON."""

    def __init__(
        self, section: memoryview, header_length: int | None, max_bytes: int, shared_memory: SharedMemory | None
    ) -> None:
        self._section = section
        self._header_length = header_length
        self._start = 0
        self._most = self._room = max_bytes
        self._shared_memory = shared_memory

    def take(self, tensor: RequestedInput) -> InputTensor:
        """Returns an input, and goes past its data."""
        parameters = read_parameters(tensor.parameters, f"the input {shown(tensor.name)}")
        where = region_slice(tensor.name, parameters)
        values = tensor.values
        given = [where is not None, "binary_data_size" in parameters, values is not None]
        if sum(given) != 1:
            raise BadRequestError(
                f"the input {shown(tensor.name)} has " + ("no data" if not any(given) else "its data in two places"),
                hint="Give one of `data` and the parameters `binary_data_size` and `shared_memory_region`.",
            )
        self._room -= input_bytes(tensor.name, tensor.datatype, tensor.shape)
        if self._room < 0:
            raise TooLargeError(f"the inputs have more than {self._most} bytes, which no request of this model needs")
        if where is not None:
            return input_of_region(self._shared_memory, tensor.name, tensor.datatype, tensor.shape, where)
        if values is not None:
            array = array_of_json(tensor.name, tensor.datatype, tensor.shape, values)
            return input_of_array(tensor.name, tensor.datatype, tensor.shape, array)
        return self._take_binary(
            tensor, whole_number(f"the input {shown(tensor.name)}", parameters, "binary_data_size")
        )

    def _take_binary(self, tensor: RequestedInput, size: int) -> InputTensor:
        left = self._section.nbytes - self._start
        if size > left:
            raise BadRequestError(
                f"the input {shown(tensor.name)} has {size} bytes of binary data; {left} are left in the body",
                hint=f"{HEADER_LENGTH} says how long the JSON is."
                if self._header_length is not None
                else f"The request has no header {HEADER_LENGTH}, so all of its body is JSON.",
            )
        check_data_size(tensor.name, tensor.datatype, tensor.shape, size)
        data = self._section[self._start : self._start + size]
        self._start += size
        return checked_input(tensor.name, tensor.datatype, tensor.shape, data)

    def check_end(self) -> None:
        """Raises BadRequestError if bytes are left."""
        left = self._section.nbytes - self._start
        if left:
            raise BadRequestError(
                f"the binary data is {left} bytes longer than its inputs",
                hint=f"The `binary_data_size` of the inputs and {HEADER_LENGTH} add up to the length of the body.",
            )


def _forms(wanted: Sequence[RequestedOutput], default: OutputForm) -> OutputForms:
    check_names("output", (output.name for output in wanted))
    forms = {}
    for output in wanted:
        parameters = read_parameters(output.parameters, f"the output {shown(output.name)}")
        forms[output.name] = output_form(output.name, parameters, default)
    return OutputForms(default, forms)


def _check_forms(
    forms: OutputForms, names: Sequence[str], outputs: Sequence[Mapping[str, Any]], shared_memory: SharedMemory | None
) -> None:
    """Refuses before the model runs what could not be written after it."""
    for form in forms.named.values():
        if form.region is not None:
            offered(shared_memory)
    for output in outputs:
        name = output["name"]
        if not names or name in forms.named:
            check_form(name, output["datatype"], forms.of(name))


def check_form(name: str, datatype: str, form: OutputForm) -> None:
    """Raises BadRequestError if an output of this datatype cannot be returned in this form."""
    if datatype in BINARY_ONLY and not form.binary and form.region is None:
        raise BadRequestError(
            f"the output {shown(name)} is {datatype}, which cannot be returned as JSON",
            hint="Ask for it with the parameter `binary_data`: true, or for all with `binary_data_output`: true.",
        )


def _raw(body: memoryview, inputs: Sequence[Mapping[str, Any]], batched: bool) -> ParsedBody:
    """Returns the request of a body that is the data of the model's only input."""
    if len(inputs) != 1:
        names = ", ".join(str(described["name"]) for described in inputs)
        raise BadRequestError(
            f"the header {HEADER_LENGTH} is 0, which is for models of one input; this has {len(inputs)}: {names}",
            hint=f"Send JSON before the data, and its length as {HEADER_LENGTH}.",
        )
    name, datatype, shape = inputs[0]["name"], inputs[0]["datatype"], list(inputs[0]["shape"])
    varying = [place for place, length in enumerate(shape) if length < 0]
    if batched and len(varying) > 1 and varying[0] == 0:
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
