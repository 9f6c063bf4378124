"""ARR-COC's part of the server's page: a try-it for models that choose the patches of an image for a query.

It draws what they say. The package alone must suffice to recognise one: only names, dtypes and sizes of the call count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exportkit.package.manifest import Call, Size, TensorInput

STATIC = Path(__file__).with_name("static")

_CHOSEN = {"features", "indices", "budgets", "scores", "relevance"}  # the outputs that are drawn
_FLOATING = {"float64", "float32", "float16", "bfloat16"}


def recognise(call: Call) -> dict[str, Any] | None:
    """Returns which inputs are the image and the query, and the side of a patch in pixels; None for another model.

    The image is [B, 3, P * rows, P * columns]. The query is as wide as the features, because a query is made of them:
    [B, D], or [B, T, D] beside a boolean mask [B, T].
    """
    outputs = {output.name: output for output in call.outputs}
    image = next((tensor for tensor in call.inputs if _is_image(tensor)), None)
    if image is None or not outputs.keys() >= _CHOSEN:
        return None
    others = [tensor for tensor in call.inputs if tensor is not image]
    ranks = {(len(tensor.shape), tensor.dtype == "bool"): tensor for tensor in others}
    query, mask = ranks.get((2, False)), None
    if query is None:
        query, mask = ranks.get((3, False)), ranks.get((2, True))
    features = outputs["features"].shape
    if query is None or len(others) != 1 + (mask is not None) or query.dtype != image.dtype:
        return None
    if len(features) != 3 or not isinstance(features[-1], int) or query.shape[-1] != features[-1]:
        return None
    one = {dimension.name for dimension in call.dimensions if dimension.min == 1}
    free = [size for tensor in call.inputs if tensor is not image for size in tensor.shape[:-1]]
    if not all(size == 1 or (isinstance(size, Size) and size.dimension in one) for size in (image.shape[0], *free)):
        return None
    rows = image.shape[2]
    assert isinstance(rows, Size)
    return {
        "image": image.name,
        "query": query.name,
        "mask": mask.name if mask is not None else None,
        "patch": rows.scale,
        "width": features[-1],
    }


def _is_image(tensor: TensorInput) -> bool:
    if len(tensor.shape) != 4 or tensor.shape[1] != 3 or tensor.dtype not in _FLOATING:
        return False
    rows, columns = tensor.shape[2:]
    if not isinstance(rows, Size) or not isinstance(columns, Size) or rows.dimension == columns.dimension:
        return False
    return rows.scale == columns.scale and rows.offset == columns.offset == 0
