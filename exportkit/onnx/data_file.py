"""Writes the large weights of ONNX models to a file beside them, which several methods share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from exportkit.package.manifest import OnnxData

if TYPE_CHECKING:
    import onnx_ir

DATA_THRESHOLD = 2 * 10**9  # bytes of tensors inside a model; protobuf takes 2^31 with everything else
_KEPT_INSIDE = 1024  # bytes of a tensor that stays in the model: shapes are among them, and checkers read those
_WORTH_SHARING = 1 << 20  # bytes that models of several methods would have twice
_ALIGNMENT = 4096  # of tensors in the data file, so that they can be mapped


@contextmanager
def weights_outside(
    models: Sequence[onnx_ir.Model], name: str, folder: Path, threshold: int
) -> Iterator[list[OnnxData | None]]:
    """Puts large tensors into the file `data` in a folder while the block runs, if they are too many for the models.

    They are if one model has more bytes than the threshold, or if several methods would repeat a MiB of weights. What
    is equal in several models is written once. It yields for each model the file that it needs, whose name begins so;
    None if its weights are inside.
    """
    import onnx_ir
    from onnx_ir.external_data import convert_tensors_to_external

    tensors = [_tensors(model) for model in models]
    large = [{v: t for v, t in each.items() if t.nbytes > _KEPT_INSIDE} for each in tensors]
    several = len(models) > 1
    keys: dict[onnx_ir.Value, object] = {
        value: _content(tensor) if several else value for each in large for value, tensor in each.items()
    }
    written: dict[object, onnx_ir.TensorProtocol] = {}  # in the order of their first use
    for each in large:
        for value, tensor in each.items():
            written.setdefault(keys[value], tensor)
    repeated = sum(t.nbytes for each in large for t in each.values()) - sum(t.nbytes for t in written.values())
    most = max(sum(tensor.nbytes for tensor in each.values()) for each in tensors)
    if not written or (most <= threshold and repeated < _WORTH_SHARING):
        yield [None] * len(models)
        return
    placed = convert_tensors_to_external(
        list(written.values()), folder, "data", alignment=_ALIGNMENT, align_threshold=_KEPT_INSIDE
    )
    places = dict(zip(written, placed))
    with (folder / "data").open("rb") as file:
        os.fsync(file.fileno())
        sha256, size = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
    data = OnnxData(name=f"{name}.{sha256[:16]}.data", size=size, sha256=sha256)
    try:
        for each in large:
            for value, tensor in each.items():
                at = places[keys[value]]
                value.const_value = onnx_ir.ExternalTensor(
                    data.name,
                    at.offset,
                    at.length,
                    tensor.dtype,
                    shape=onnx_ir.Shape(tensor.shape.numpy()),
                    name=tensor.name or "",
                )
        yield [data if each else None for each in large]
    finally:
        for each in large:
            for value, tensor in each.items():
                value.const_value = tensor


def _tensors(model: onnx_ir.Model) -> dict[onnx_ir.Value, onnx_ir.TensorProtocol]:
    """Returns the constants of a model that a file can hold."""
    import onnx_ir

    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    return {
        value: value.const_value
        for value in values
        if value.const_value is not None and value.const_value.dtype != onnx_ir.DataType.STRING
    }


def _content(tensor: onnx_ir.TensorProtocol) -> tuple[object, ...]:
    """Returns what is the same for tensors of the same bytes."""
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()
