"""Writes the body of an HTTP answer to an inference."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from exportkit.serve.protocol.datatypes import shown
from exportkit.serve.protocol.inference import InferAnswer, OutputTensor
from exportkit.serve.protocol.parameters import OutputForms, check_form
from exportkit.serve.protocol.values import numpy_dtype
from exportkit.serve.statuses import BadRequestError

_ENCODER = msgspec.json.Encoder()


def encode_answer(answer: InferAnswer, forms: OutputForms) -> tuple[int | None, list[bytes | memoryview]]:
    """Returns the length of the JSON and the parts of the body: the JSON, then each output's own memory.

    The length is for the header Inference-Header-Content-Length; None: all is JSON, and that header is not sent.

    Raises:
        BadRequestError: An output cannot be written as JSON (FP16, BF16, NaN, infinity).
    """
    outputs: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    for output in answer.outputs:
        form = forms.of(output.name)
        check_form(output.name, output.datatype, form)
        written: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if form.binary:
            written["parameters"] = {"binary_data_size": output.data.nbytes}
            binary.append(output.data)
        else:
            written["data"] = _values(output)
        outputs.append(written)
    named = {"id": answer.id} if answer.id else {}
    header = _ENCODER.encode({"model_name": answer.model, "model_version": answer.version, **named, "outputs": outputs})
    return (len(header) if binary else None), [header, *(data for data in binary if data.nbytes)]


def _values(output: OutputTensor) -> list[Any]:
    """Returns an output's elements in row-major order, as Triton writes them.

    Triton writes the literals NaN and Infinity. They are not JSON, and most readers then refuse the whole answer.
    """
    array = np.frombuffer(output.data, numpy_dtype(output.datatype))
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadRequestError(
            f"the output {shown(output.name)} has NaN or infinity, which JSON cannot hold",
            hint="Ask for it with the parameter `binary_data`: true, or for all with `binary_data_output`: true.",
        )
    return array.tolist()
