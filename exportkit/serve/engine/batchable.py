"""Which models may get the rows of several requests in one call: what the manifest says about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exportkit.package.manifest import Dimension, Manifest, PackagedMethod, Size, TensorInput, TensorOutput
from exportkit.runtime.state import state_dimensions


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


def row_dimension(manifest: Manifest, method: PackagedMethod) -> Dimension | str:
    """Finds the dimension that is axis 0 of every input, output and state of a method, and no other size anywhere.

    Returns:
        The dimension, or why requests, or steps of different sequences, cannot run together.
    """
    call = method.call
    if not call.inputs or not call.outputs:
        return "the model has no inputs or no outputs"
    first = call.inputs[0].shape[0] if call.inputs[0].shape else None
    if not isinstance(first, Size):
        return f"the first size of input `{call.inputs[0].name}` does not vary"
    tensors: tuple[TensorInput | TensorOutput, ...] = (*call.inputs, *call.outputs)
    for tensor in tensors:
        if reason := _why_not(f"`{tensor.name}`", tensor.shape, first.dimension, "requests"):
            return reason
    (dimension,) = (each for each in call.dimensions if each.name == first.dimension)
    if dimension.max < 2 * max(dimension.min, 1):
        return f"{dimension.name} is from {dimension.min} to {dimension.max}, which leaves no room for two requests"
    if method.state and set(state_dimensions(manifest)) != {dimension.name}:
        return f"the size of the state is not {dimension.name} alone"
    for state in (manifest.state[use.index] for use in method.state):
        if reason := _why_not(f"the state `{state.name}`", state.shape, dimension.name, "sequences"):
            return reason
    return dimension


def _why_not(what: str, shape: Sequence[int | Size | None], rows: str, whose: str) -> str | None:
    """Returns why a tensor does not consist of one row for each number in the dimension `rows`."""
    if not shape or shape[0] != Size(dimension=rows):
        return f"the first size of {what} is not {rows}, so its rows are not the {whose}'"
    for axis, size in enumerate(shape[1:], 1):
        if isinstance(size, Size) and size.dimension == rows:
            return f"the size of {what} in dimension {axis} depends on {rows} as well"
    return None
