"""Which models may get the rows of several requests in one call: what the manifest says about it."""

from __future__ import annotations

from dataclasses import dataclass

from exportkit.package.manifest import Call, Dimension, Size, TensorInput, TensorOutput


@dataclass(frozen=True)
class Batching:
    """Whether requests run together.

    Attributes:
        dimension: The dimension of which each request brings a part; None if each request runs alone.
        max_rows: The most rows of a batch; 1 if each request runs alone, whatever its rows.
        reason: Why each request runs alone; None if they do not.
        bit_equal: Whether answers are the same to the last bit, however requests are put together, as far as the
            recorded cases show. A model without batches always answers the same.
    """

    dimension: Dimension | None
    max_rows: int = 1
    reason: str | None = None
    bit_equal: bool = True

    @classmethod
    def impossible(cls, reason: str) -> Batching:
        """Each request runs alone."""
        return cls(None, reason=reason)

    @property
    def enabled(self) -> bool:
        """Whether requests run together."""
        return self.dimension is not None


def batch_dimension(call: Call) -> Dimension | str:
    """Finds the dimension that is axis 0 of every input and output and no other size anywhere.

    Returns:
        The dimension, or why there is none.
    """
    tensors: tuple[TensorInput | TensorOutput, ...] = (*call.inputs, *call.outputs)
    if not call.inputs or not call.outputs:
        return "the model has no inputs or no outputs"
    first = call.inputs[0].shape[0] if call.inputs[0].shape else None
    if not isinstance(first, Size):
        return f"the first size of input `{call.inputs[0].name}` does not vary"
    for tensor in tensors:
        if reason := _why_not(tensor, first.dimension):
            return reason
    (dimension,) = (each for each in call.dimensions if each.name == first.dimension)
    if dimension.max < 2 * max(dimension.min, 1):
        return f"{dimension.name} is from {dimension.min} to {dimension.max}, which leaves no room for two requests"
    return dimension


def _why_not(tensor: TensorInput | TensorOutput, batch: str) -> str | None:
    """Returns why a tensor does not consist of one row for each number in the batch dimension."""
    name = f"`{tensor.name}`"
    if not tensor.shape or tensor.shape[0] != Size(dimension=batch):
        return f"the first size of {name} is not {batch}, so its rows are not the requests'"
    for axis, size in enumerate(tensor.shape[1:], 1):
        if isinstance(size, Size) and size.dimension == batch:
            return f"the size of {name} in dimension {axis} depends on {batch} as well"
    return None
