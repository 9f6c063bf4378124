"""Writes the body of an HTTP answer to an inference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
    if answer.outputs and forms.default.binary and not forms.named:
        parts = [output.data for output in answer.outputs]
        described = [(each.name, each.datatype, each.shape, part.nbytes) for each, part in zip(answer.outputs, parts)]
        header = _header(answer, _described(tuple(described)))
        return len(header), [header, *[part for part in parts if part]]
    outputs: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    any_binary = False
    for output in answer.outputs:
        form = forms.of(output.name)
        if not form.binary:
            check_form(output.name, output.datatype, form)
        written: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if form.binary:
            any_binary = True
            written["parameters"] = {"binary_data_size": output.data.nbytes}
            if output.data.nbytes:
                binary.append(output.data)
        else:
            written["data"] = _values(output)
        outputs.append(written)
    header = _header(answer, outputs)
    return (len(header) if any_binary else None), [header, *binary]


def _header(answer: InferAnswer, outputs: object) -> bytes:
    named = {"id": answer.id} if answer.id else {}
    return _ENCODER.encode({"model_name": answer.model, "model_version": answer.version, **named, "outputs": outputs})


@lru_cache(1024)
def _described(outputs: tuple[tuple[str, str, Sequence[int], int], ...]) -> msgspec.Raw:
    """Returns the JSON of binary outputs: name, datatype, shape and bytes of each. Most answers have the same."""
    return msgspec.Raw(
        _ENCODER.encode(
            [
                {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
                for name, datatype, shape, size in outputs
            ]
        )
    )


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
