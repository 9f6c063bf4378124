"""What became of a request, as the metrics count it."""

from __future__ import annotations

from typing import NamedTuple

from exportkit.serve.operations.observation import Finished


class Outcome(NamedTuple):
    """What became of a request.

    Attributes:
        protocol: The way in.
        status: The HTTP status; gRPC's have the status that HTTP would give.
        model, version: Those of an inference. Empty: none was known.
        reason: The `reason` of its error. Empty: it was answered, or it only asked for the health.
    """

    protocol: str
    status: int
    model: str
    version: str
    reason: str

    @classmethod
    def of(cls, finished: Finished) -> Outcome:
        """Returns the outcome of a request. A probe that hears "not ready" got its answer: it has no reason."""
        record = finished.record
        refused = record.error is not None and not finished.path.startswith("/v2/health/")
        reason = record.error.reason if refused and record.error is not None else ""
        return cls(record.protocol, record.status, record.model, record.version, reason)
