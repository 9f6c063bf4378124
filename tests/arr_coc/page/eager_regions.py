"""ARR-COC without a compiler behind the page: variants of the model at no cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from exportkit.arr_coc.model import ARRCOC
from exportkit.package import manifest as m
from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine.checked_request import bytes_of
from exportkit.serve.engine.model_description import Batching, ModelDescription
from exportkit.serve.engine.servable import Servable
from exportkit.serve.protocol.datatypes import DATATYPES
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, InferTiming, OutputTensor
from tests.arr_coc.page.calls import region_call
from tests.package import samples
from tests.runtime import tiny
from tests.serve.page.doubles import Model
from tests.serve.page.sent_requests import DTYPES


def call_of(model: ARRCOC, *, tokens: bool) -> m.Call:
    """The call that an export of the model has."""
    plain = region_call()
    patch, dtype = model.encoder.patch_size, "float32"
    batch, rows, columns = (m.Size(dimension="b"), *(m.Size(dimension=name, scale=patch) for name in ("gh", "gw")))
    inputs = [m.TensorInput(name="image", dtype=dtype, shape=(batch, 3, rows, columns), written=None)]
    if tokens:
        words = m.Size(dimension="t")
        inputs.append(m.TensorInput(name="query", dtype=dtype, shape=(batch, words, model.query_dim), written=None))
        inputs.append(m.TensorInput(name="mask", dtype="bool", shape=(batch, words), written=None))
    else:
        inputs.append(m.TensorInput(name="query", dtype=dtype, shape=(batch, model.query_dim), written=None))
    int8 = model.selector.feature_dtype == "int8"
    features = msgspec.structs.replace(
        plain.outputs[0], dtype="int8" if int8 else dtype, shape=(batch, None, model.encoder.dim)
    )
    scales = msgspec.structs.replace(plain.outputs[3], name="feature_scales")
    dimensions = [m.Dimension(name="b", min=1, max=4)]
    dimensions += [m.Dimension(name=name, min=max(2, model.encoder.min_rows), max=64) for name in ("gh", "gw")]
    return msgspec.structs.replace(
        plain,
        inputs=tuple(inputs),
        outputs=(features, *plain.outputs[1:], *([scales] if int8 else [])),
        dimensions=(*dimensions, m.Dimension(name="t", min=1, max=8)),
    )


def manifest(call: m.Call) -> m.Manifest:
    """A manifest with a call."""
    return samples.manifest(methods=tiny.forward(call), operators=(), libraries=(), cases=())


@dataclass
class EagerModel(Model):
    """A model that is served by calling a module."""

    module: ARRCOC | None = None

    def metadata(self) -> dict[str, Any]:
        alone = Batching.impossible("the test does not need it")
        whole = manifest(self.call)
        return ModelDescription(
            name=self.name,
            version=self.version,
            manifest=whole,
            batching=alone,
            limits=BatchLimits(),
            devices=self.devices,
            runners=1,
            weights=None,
            method=whole.methods[0].name,
            offered=Servable({}, {}),
        ).metadata()

    @property
    def body_rules(self) -> BodyRules:
        return BodyRules.of(self.metadata(), 1 << 30)

    @contextmanager
    def admit(self, size: int) -> Iterator[None]:
        yield

    async def infer(self, request: InferRequest) -> InferAnswer:
        assert self.module is not None
        given = {
            each.name: torch.frombuffer(bytearray(each.data), dtype=DTYPES[each.datatype]).view(each.shape)
            for each in request.inputs
        }
        with torch.no_grad():
            answer = self.module(**given)
        outputs = tuple(_output(name, tensor.contiguous()) for name, tensor in answer.items())
        return InferAnswer(self.name, self.version, request.id, outputs, InferTiming(0.0, 0.0, 0.0, 0.0, 1))


def eager(module: ARRCOC, *, tokens: bool = False, **changes: Any) -> EagerModel:
    return EagerModel(call=call_of(module, tokens=tokens), module=module, **changes)


def _output(name: str, tensor: torch.Tensor) -> OutputTensor:
    return OutputTensor(
        name, DATATYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), bytes_of(tensor)
    )
