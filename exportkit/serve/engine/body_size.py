"""The largest request that a model takes."""

from __future__ import annotations

from exportkit.package.manifest import Call, Dimension
from exportkit.sizes import input_bytes

# A manifest may allow sizes that no machine can hold, such as a dimension up to 2^63. Then this is the limit.
# gRPC's messages end here as well.
LARGEST_BODY = 2**31 - 1


def largest_body(call: Call, batch: Dimension | None, max_rows: int) -> int:
    """Returns the most bytes that the inputs of one request can have, at most LARGEST_BODY.

    Args:
        call: The manifest's call.
        batch: The batch dimension; None if the model is not batched.
        max_rows: The most rows of a batch, and so of a request.
    """
    sizes = {dimension.name: dimension.max for dimension in call.dimensions}
    if batch is not None:
        sizes[batch.name] = max_rows
    return min(input_bytes(call, sizes), LARGEST_BODY)
