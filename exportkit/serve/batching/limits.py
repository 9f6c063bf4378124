"""What may wait, and what may run together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchLimits:
    """The limits of one model's queue and batches.

    Attributes:
        max_rows: The most rows of a batch. None: as many as the model takes.
        max_delay: Seconds that a request may wait for others while a runner is free.
        max_queued_rows: The most rows that wait.
        max_queued_bytes: The most bytes of inputs that wait.
    """

    max_rows: int | None = None
    max_delay: float = 0.0
    max_queued_rows: int = 1024
    max_queued_bytes: int = 1 << 30
