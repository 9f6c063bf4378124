"""A small ONNX model with its sidecar, made without the exporter: y = 2 x w and n = argmax(y), for 1 to 8 rows.

The factor 2 is the custom operator toy::twice, an ONNX function.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx
import onnx_ir
import torch
from onnx import numpy_helper
from safetensors.torch import save

from exportkit.export.record.cases import state_sha256
from exportkit.onnx.files import DATA_THRESHOLD, MethodModel, write_onnx
from exportkit.package import manifest as m
from tests.package import samples
from tests.runtime import tiny

OPSET = 20
ROWS, COLUMNS = 3, 400  # w takes more than what stays inside a model
CASE = "exportkit/cases/0.safetensors"
FUNCTION = m.OnnxFunction(operator="toy::twice", domain="toy", name="twice", overload="")
OPERATOR = m.Operator(name="toy::twice", schema="toy::twice(Tensor x) -> Tensor")
SOURCE = "net.py:Net"
NET = "from tests.onnx.small_models import Net\n"


class Net(torch.nn.Module):
    """The model in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS).sin())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = (x * 2) @ self.w
        return {"y": y, "n": y.argmax(1)}


def model_proto(w: torch.Tensor | None = None) -> onnx.ModelProto:
    """The model in ONNX; `w` are other weights than those of Net."""
    weights = Net().w if w is None else w
    proto = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": {OPSET}, "toy": 1]>
        small (float[rows, {ROWS}] x) => (float[rows, {COLUMNS}] y, int64[rows] n) {{
            doubled = toy.twice(x)
            y = MatMul(doubled, w)
            n = ArgMax <axis = 1, keepdims = 0> (y)
        }}
        <domain: "toy", opset_import: ["": {OPSET}]>
        twice (x) => (y) {{ y = Add(x, x) }}
    """)
    proto.graph.initializer.append(numpy_helper.from_array(weights.numpy(), "w"))
    return proto


def manifest(*, source: str | None = SOURCE) -> m.Manifest:
    """What describes the model."""
    rows = m.Size(dimension="rows")
    outputs = {"y": ("float32", (rows, COLUMNS)), "n": ("int64", (rows,))}
    call = tiny.tensors_call({"x": ("float32", (rows, ROWS))}, outputs, tolerance=tiny.NEAR, rows=(1, 8))
    accuracy = {"y": m.Accuracy(rms=1e-7, greatest=1e-6)}
    recorded = m.CaseCall(method="forward", sizes={"rows": 2}, accuracy=accuracy)
    return samples.bare_manifest(
        "small",
        methods=tiny.forward(call),
        source=m.Source(model=source, model_kwargs={}, dtype=None, seed=0, state_sha256=state_sha256(Net())),
        operators=(OPERATOR,),
        cases=(m.Case(record=CASE, calls=(recorded,), reference_dtype="float64"),),
    )


def case() -> bytes:
    """The recorded case: eager's outputs, and y in float64."""
    x = torch.linspace(-1, 1, 2 * ROWS).reshape(2, ROWS)
    net = Net()
    outputs = net(x)
    wide = (x.double() * 2) @ net.w.double()
    return save({"0.input.0": x, "0.output.0": outputs["y"], "0.output.1": outputs["n"], "0.reference.0": wide})


def write_small(
    out: Path,
    change: Callable[[onnx.ModelProto], object] = lambda proto: None,
    *,
    data_threshold: int = DATA_THRESHOLD,
    proto: onnx.ModelProto | None = None,
    **changes: object,
) -> Path:
    """Writes the model and its sidecar.

    Args:
        out: The `.onnx`.
        change: Changes the model.
        data_threshold: As for write_onnx.
        proto: Another model.
        changes: Other keys of the manifest.
    """
    proto = proto or model_proto()
    change(proto)
    described = msgspec.structs.replace(manifest(), **changes)
    write_onnx(
        out,
        [MethodModel(onnx_ir.serde.deserialize_model(proto), (FUNCTION,))],
        described,
        {recording.record: case() for recording in described.cases},
        opset=OPSET,
        data_threshold=data_threshold,
    )
    return out
