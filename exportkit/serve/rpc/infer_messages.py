"""Reads ModelInferRequest and writes ModelInferResponse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from exportkit.serve.protocol.datatypes import shown
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, InputTensor
from exportkit.serve.protocol.parameters import (
    OutputForm,
    check_names,
    check_not_shared,
    output_form,
    scheduling,
)
from exportkit.serve.protocol.tensors import TensorSpec
from exportkit.serve.rpc.message_classes import message_class, read_message
from exportkit.serve.statuses import BadRequestError

_REQUEST = message_class("inference.ModelInferRequest")
_RESPONSE = message_class("inference.ModelInferResponse")
_STREAMED = message_class("inference.ModelStreamInferResponse")
_RAW_INPUTS: int = _REQUEST.RAW_INPUT_CONTENTS_FIELD_NUMBER
_RAW_OUTPUTS: int = _RESPONSE.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_STREAMED_ANSWER: int = _STREAMED.INFER_RESPONSE_FIELD_NUMBER

_MOST_PARAMETERS = 256  # of a request or a tensor

# The field of InferTensorContents of each datatype, and what its elements are. There is none for 16-bit floats.
_TYPED: Mapping[str, tuple[str, str]] = {
    "BOOL": ("bool_contents", "bool"),
    **{f"UINT{bits}": ("uint_contents", "uint32") for bits in (8, 16, 32)},
    "UINT64": ("uint64_contents", "uint64"),
    **{f"INT{bits}": ("int_contents", "int32") for bits in (8, 16, 32)},
    "INT64": ("int64_contents", "int64"),
    "FP32": ("fp32_contents", "float32"),
    "FP64": ("fp64_contents", "float64"),
}


class ReceivedRequest:
    """A ModelInferRequest.

    Attributes:
        model: The name of the model that is asked.
        version: Its version; empty: the newest.
        size: The bytes of the inputs, as their shapes say.
        method: The method of the package that is asked; None: the one that the model's name says.
        sequence: Which step of a sequence it is. None: it belongs to none.
    """

    def __init__(self, data: bytes) -> None:
        """Reads a message, and checks all but the elements of its inputs.

        Raises:
            BadRequestError: The bytes are not such a message, or it breaks the protocol.
            NotOfferedError: It asks for a part of the protocol that is not offered.
        """
        self._message = message = read_message(_REQUEST, data, tensors=_RAW_INPUTS)
        check_names("input", [tensor.name for tensor in message.inputs])
        check_names("output", [output.name for output in message.outputs])
        for output in message.outputs:
            output_form(output.name, plain_parameters(output.parameters), OutputForm(binary=True))
        raw = len(message.raw_input_contents)
        if raw not in (0, len(message.inputs)):
            raise BadRequestError(f"the request has {raw} `raw_input_contents` for {len(message.inputs)} inputs")
        for tensor in message.inputs:
            check_not_shared(tensor.name, plain_parameters(tensor.parameters))
            if raw and tensor.HasField("contents"):
                raise BadRequestError(
                    f"the input {shown(tensor.name)} has `contents`, and the request has `raw_input_contents`",
                    hint="Send the elements of all inputs in the same of the two.",
                )
        self._specs = [TensorSpec.of(tensor.name, tensor.datatype, tensor.shape) for tensor in message.inputs]
        self._scheduling = scheduling(plain_parameters(message.parameters))
        self.model: str = message.model_name
        self.version: str = message.model_version
        self.size = sum(spec.size for spec in self._specs)
        self.method, self.sequence = self._scheduling.method, self._scheduling.sequence

    def request(self, seconds_left: float | None) -> InferRequest:
        """Returns the request, whose inputs do not need the message any more.

        Args:
            seconds_left: Seconds until the deadline of the call. None: it has none.

        Raises:
            BadRequestError: The elements of an input are not what its datatype and shape need.
        """
        message = self._message
        if message.raw_input_contents:
            contents = zip(self._specs, message.raw_input_contents)
            inputs = tuple(spec.of_bytes(memoryview(data)) for spec, data in contents)
        else:
            inputs = tuple(_of_contents(spec, tensor) for spec, tensor in zip(self._specs, message.inputs))
        return self._scheduling.request(inputs, [output.name for output in message.outputs], message.id, seconds_left)


def _of_contents(spec: TensorSpec, tensor: Any) -> InputTensor:
    """Returns an input with the elements of its `contents`."""
    if spec.datatype not in _TYPED:
        raise BadRequestError(
            f"the input {shown(spec.name)} is {spec.datatype}, for which `contents` has no field",
            hint="Send its bytes in `raw_input_contents`.",
        )
    expected, dtype = _TYPED[spec.datatype]
    for field, _ in tensor.contents.ListFields():
        if field.name != expected:
            raise BadRequestError(
                f"the elements of the input {shown(spec.name)}, which is {spec.datatype}, are in `{field.name}`",
                hint=f"Put them into `{expected}`, or their bytes into `raw_input_contents`.",
            )
    return spec.of_numbers(np.array(getattr(tensor.contents, expected), dtype))


def plain_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a message's parameters. One without a value is None.

    Raises:
        BadRequestError: There are too many.
    """
    if len(parameters) > _MOST_PARAMETERS:
        raise BadRequestError(f"there are {len(parameters)} parameters in one place; {_MOST_PARAMETERS} are allowed")
    kinds = {name: parameter.WhichOneof("parameter_choice") for name, parameter in parameters.items()}
    return {name: getattr(parameters[name], kind) if kind else None for name, kind in kinds.items()}


def encode_answer(answer: InferAnswer) -> bytes:
    """Returns the ModelInferResponse. The elements are copied once; protobuf would copy them three times."""
    described = _RESPONSE(model_name=answer.model, model_version=answer.version, id=answer.id)
    parts: list[bytes | memoryview] = []
    for output in answer.outputs:
        described.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        parts += (_field_head(_RAW_OUTPUTS, output.data.nbytes), output.data)
    return b"".join((described.SerializeToString(), *parts))


def streamed_answer(answer: bytes) -> bytes:
    """Returns the ModelStreamInferResponse with an answer."""
    return _field_head(_STREAMED_ANSWER, len(answer)) + answer


def streamed_error(text: str) -> bytes:
    """Returns the ModelStreamInferResponse with an error."""
    return bytes(_STREAMED(error_message=text).SerializeToString())


def _field_head(number: int, size: int) -> bytes:
    """Returns what stands before a field of so many bytes: its number with the wire type 2, and its length."""
    head = bytearray([number << 3 | 2])
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)
