"""Whether the rows of several requests may share a call."""

from __future__ import annotations

from dataclasses import dataclass

from exportkit.package.manifest import Dimension


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
