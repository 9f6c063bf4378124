"""The largest request that a model takes."""

from __future__ import annotations

import math

from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Call, Dimension
from exportkit.sizes import shape_at

# A manifest may allow sizes that no machine can hold, such as a dimension up to 2^63. Then this is the limit.
# gRPC's messages end here as well.
LARGEST_BODY = 2**31 - 1

_HEADER_BYTES = 64 << 10  # of all that is not elements: names, shapes, parameters
_ELEMENT_TEXT = 26  # "-2.2250738585072014e-308, "


def largest_inputs(call: Call, batch: Dimension | None, max_rows: int) -> int:
    """Returns the most bytes that the inputs of one request can have, at most LARGEST_BODY.

    Args:
        call: The manifest's call.
        batch: The batch dimension; None if the model is not batched.
        max_rows: The most rows of a batch, and so of a request.
    """
    return _largest(call, batch, max_rows, text=False)


def largest_body(call: Call, batch: Dimension | None, max_rows: int) -> int:
    """Returns the most bytes that a request's body can have, at most LARGEST_BODY: its tensors may be text."""
    return min(_largest(call, batch, max_rows, text=True) + _HEADER_BYTES, LARGEST_BODY)


def _largest(call: Call, batch: Dimension | None, max_rows: int, *, text: bool) -> int:
    sizes = {dimension.name: dimension.max for dimension in call.dimensions}
    if batch is not None:
        sizes[batch.name] = max_rows
    total = 0
    for tensor in call.inputs:
        total += math.prod(shape_at(tensor, sizes)) * (_ELEMENT_TEXT if text else ITEM_BYTES[tensor.dtype])
    return min(total, LARGEST_BODY)
