"""What the JSON of an HTTP request says, without the tensors' data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from exportkit.serve.protocol.datatypes import shown
from exportkit.serve.protocol.inference import InferRequest
from exportkit.serve.protocol.parameters import (
    OutputForm,
    OutputForms,
    RegionSlice,
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
from exportkit.serve.protocol.tensor_checks import check_data_size, input_bytes
from exportkit.serve.statuses import BadRequestError

_REMEMBERED = 256  # texts
_REMEMBERED_BYTES = 4096  # of a text, at most: requests whose data is binary have a few hundred


@dataclass(frozen=True)
class InputHead:
    """An input without its data. Without `region` and `values`, the data is in the binary section.

    Attributes:
        name, datatype, shape: As in the JSON.
        size: The bytes that the datatype and the shape need.
        region: The data's place in shared memory.
        values: The data as JSON.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int
    region: RegionSlice | None
    values: memoryview | None


@dataclass(frozen=True)
class RequestHead:
    """What the JSON of a request says.

    Attributes:
        inputs: The inputs, without their data.
        forms: The form of each output.
        request: The rest of the request. It has no inputs.
    """

    inputs: tuple[InputHead, ...]
    forms: OutputForms
    request: InferRequest


def read_head(text: memoryview) -> RequestHead:
    """Reads the JSON of a request.

    Raises:
        BadRequestError: It breaks the protocol. The message names the key or the input.
        NotOfferedError: It asks for a part of the protocol that is not offered.
    """
    if text.nbytes > _REMEMBERED_BYTES:
        return _read(text)
    return _remembered(bytes(text))


@functools.lru_cache(maxsize=_REMEMBERED)
def _remembered(text: bytes) -> RequestHead:
    """Reads a text once. Clients send the same text again and again, with other data."""
    return _read(memoryview(text))


def _read(text: memoryview) -> RequestHead:
    message = read_request(text)
    parameters = read_parameters(message.parameters, "the request")
    default = OutputForm(truth("the request", parameters, "binary_data_output", False))
    forms = _forms(read_outputs(message), default)
    inputs = tuple(_input(tensor) for tensor in read_inputs(message))
    check_names("input", (tensor.name for tensor in inputs))
    return RequestHead(inputs, forms, checked_request([], list(forms.named), message.id or "", parameters))


def _forms(wanted: Sequence[RequestedOutput], default: OutputForm) -> OutputForms:
    check_names("output", (output.name for output in wanted))
    forms = {}
    for output in wanted:
        parameters = read_parameters(output.parameters, f"the output {shown(output.name)}")
        forms[output.name] = output_form(output.name, parameters, default)
    return OutputForms(default, forms)


def _input(tensor: RequestedInput) -> InputHead:
    whose = f"the input {shown(tensor.name)}"
    parameters = read_parameters(tensor.parameters, whose)
    region = region_slice(tensor.name, parameters)
    binary_size = whole_number(whose, parameters, "binary_data_size") if "binary_data_size" in parameters else None
    values = tensor.values
    given = [each is not None for each in (region, binary_size, values)]
    if sum(given) != 1:
        raise BadRequestError(
            f"{whose} has " + ("no data" if not any(given) else "its data in two places"),
            hint="Give one of `data` and the parameters `binary_data_size` and `shared_memory_region`.",
        )
    size = input_bytes(tensor.name, tensor.datatype, tensor.shape)
    if binary_size is not None:
        check_data_size(tensor.name, tensor.datatype, tensor.shape, binary_size)
    return InputHead(tensor.name, tensor.datatype, tuple(tensor.shape), size, region, values)
