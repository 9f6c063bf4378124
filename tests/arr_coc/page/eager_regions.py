"""ARR-COC without a compiler behind the page: variants of the model at no cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.arr_coc.model import ARRCOC
from exportkit.package import manifest as m
from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine.model_description import Batching, ModelDescription
from exportkit.serve.engine.servable import Servable
from exportkit.serve.protocol.http_request import BodyRules
from exportkit.serve.protocol.inference import InferAnswer, InferRequest, InferTiming, OutputTensor
from tests.arr_coc.page.calls import BATCH, OUTPUTS
from tests.package import samples
from tests.runtime import tiny
from tests.serve.engine.asking import given
from tests.serve.page.doubles import Model
from tests.serve.page.sent_requests import DTYPES


def call_of(model: ARRCOC, *, tokens: bool) -> m.Call:
    """The call that an export of the model has."""
    patch, dtype, int8 = model.encoder.patch_size, "float32", model.selector.feature_dtype == "int8"
    rows, columns = (m.Size(dimension=name, scale=patch) for name in ("gh", "gw"))
    inputs = {"image": (dtype, (BATCH, 3, rows, columns)), "query": (dtype, (BATCH, model.query_dim))}
    if tokens:
        words = m.Size(dimension="t")
        inputs |= {"query": (dtype, (BATCH, words, model.query_dim)), "mask": ("bool", (BATCH, words))}
    outputs = {**OUTPUTS, "features": ("int8" if int8 else dtype, (BATCH, None, model.encoder.dim))}
    outputs |= {"feature_scales": (dtype, (BATCH, None))} if int8 else {}
    least = max(2, model.encoder.min_rows)
    return tiny.tensors_call(inputs, outputs, b=(1, 4), gh=(least, 64), gw=(least, 64), t=(1, 8))


@dataclass
class EagerModel(Model):
    """A model that is served by calling a module."""

    module: ARRCOC | None = None

    def metadata(self) -> dict[str, Any]:
        alone = Batching.impossible("the test does not need it")
        whole = samples.manifest(methods=tiny.forward(self.call), operators=(), libraries=(), cases=())
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
        arguments = {
            each.name: torch.frombuffer(bytearray(each.data), dtype=DTYPES[each.datatype]).view(each.shape)
            for each in request.inputs
        }
        with torch.no_grad():
            answer = self.module(**arguments)
        tensors = (given(name, tensor) for name, tensor in answer.items())
        outputs = tuple(OutputTensor(each.name, each.datatype, each.shape, each.data) for each in tensors)
        return InferAnswer(self.name, self.version, request.id, outputs, InferTiming(0.0, 0.0, 0.0, 0.0, 1))


def eager(module: ARRCOC, *, tokens: bool = False, **changes: Any) -> EagerModel:
    return EagerModel(call=call_of(module, tokens=tokens), module=module, **changes)
