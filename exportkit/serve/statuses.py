"""Why a request is refused or fails, with the status that HTTP and gRPC give it."""

from __future__ import annotations

from typing import ClassVar

from exportkit.errors import ExportkitError


class ServeError(ExportkitError):
    """A request that is not answered with tensors.

    Attributes:
        status: The HTTP status.
        code: The name of the gRPC status.
        reason: The value of the label `reason` in the metrics.
        retry_after: Seconds after which the client may try again. None: the same request will fail again.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "backend"
    retry_after: ClassVar[int | None] = None

    @property
    def text(self) -> str:
        """The message and the hint in one line, as clients get them."""
        return self.message if self.hint is None else f"{self.message}. {self.hint}"


class BackendError(ServeError):
    """The model failed on valid inputs, or its worker process died."""


class BadRequestError(ServeError):
    """The request breaks the protocol, or the model does not allow its tensors."""

    status, code, reason = 400, "INVALID_ARGUMENT", "invalid"


class UnauthorizedError(ServeError):
    """The request has no valid API key."""

    status, code, reason = 401, "UNAUTHENTICATED", "unauthorized"


class ForbiddenError(ServeError):
    """A web page of another origin asks for a change."""

    status, code, reason = 403, "PERMISSION_DENIED", "unauthorized"


class NotServedError(ServeError):
    """No such model, version or URL."""

    status, code, reason = 404, "NOT_FOUND", "invalid"


class MethodNotAllowedError(ServeError):
    """The URL exists, and not for this HTTP method."""

    status, code, reason = 405, "UNIMPLEMENTED", "invalid"


class SlowClientError(ServeError):
    """The body does not come, or comes too slowly."""

    status, code, reason = 408, "DEADLINE_EXCEEDED", "cancelled"


class TooLargeError(ServeError):
    """The body, sent or decompressed, is larger than any request of the model can be."""

    status, code, reason = 413, "INVALID_ARGUMENT", "invalid"


class UnknownEncodingError(ServeError):
    """The body has a content encoding other than gzip or deflate."""

    status, code, reason = 415, "INVALID_ARGUMENT", "invalid"


class QueueFullError(ServeError):
    """As many rows or bytes wait as may."""

    status, code, reason, retry_after = 429, "RESOURCE_EXHAUSTED", "full", 1


class CancelledError(ServeError):
    """The client went away before the model ran."""

    status, code, reason = 499, "CANCELLED", "cancelled"


class NotOfferedError(ServeError):
    """A part of the protocol that this server does not offer."""

    status, code, reason = 501, "UNIMPLEMENTED", "invalid"


class NotReadyError(ServeError):
    """The server is draining, or the model is not loaded yet."""

    status, code, reason, retry_after = 503, "UNAVAILABLE", "draining", 1


class DeadlineError(ServeError):
    """The request's own timeout passed, or would have before the model could answer."""

    status, code, reason = 504, "DEADLINE_EXCEEDED", "deadline"
