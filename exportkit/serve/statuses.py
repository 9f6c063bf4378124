"""Why a request is refused or fails, with the status that HTTP and gRPC give it."""

from __future__ import annotations

from typing import Any, ClassVar

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

    def __init_subclass__(cls, **attributes: Any) -> None:
        """Takes the attributes as keywords of the class. Those that are not given are inherited."""
        super().__init_subclass__()
        for name, value in attributes.items():
            setattr(cls, name, value)

    @property
    def text(self) -> str:
        """The message and the hint in one line, as clients get them."""
        return self.message if self.hint is None else f"{self.message}. {self.hint}"


class BackendError(ServeError):
    """The model failed on valid inputs, or its worker process died."""


class BadRequestError(ServeError, status=400, code="INVALID_ARGUMENT", reason="invalid"):
    """The request breaks the protocol, or the model does not allow its tensors."""


class SequenceError(ServeError, status=409, code="FAILED_PRECONDITION", reason="sequence"):
    """The request continues a sequence that is not there: it ended, or never began.

    Not 404, which says that there is no such model, and not 410, after which a proxy may take the model's URL for gone:
    the model is there, in a state that the request does not fit. FAILED_PRECONDITION is gRPC's word for what may be
    tried again only after the client has set it right, here by beginning the sequence again.
    """


class UnauthorizedError(ServeError, status=401, code="UNAUTHENTICATED", reason="unauthorized"):
    """The request has no valid API key."""


class ForbiddenError(ServeError, status=403, code="PERMISSION_DENIED", reason="unauthorized"):
    """A web page of another origin asks for a change."""


class NotServedError(ServeError, status=404, code="NOT_FOUND", reason="invalid"):
    """No such model, version or URL."""


class MethodNotAllowedError(ServeError, status=405, code="UNIMPLEMENTED", reason="invalid"):
    """The URL exists, and not for this HTTP method."""


class SlowClientError(ServeError, status=408, code="DEADLINE_EXCEEDED", reason="cancelled"):
    """The body does not come, or comes too slowly."""


class TooLargeError(ServeError, status=413, code="INVALID_ARGUMENT", reason="invalid"):
    """The body, sent or decompressed, is larger than any request of the model can be."""


class UnknownEncodingError(ServeError, status=415, code="INVALID_ARGUMENT", reason="invalid"):
    """The body has a content encoding other than gzip or deflate."""


class QueueFullError(ServeError, status=429, code="RESOURCE_EXHAUSTED", reason="full", retry_after=1):
    """As many rows or bytes wait as may."""


class CancelledError(ServeError, status=499, code="CANCELLED", reason="cancelled"):
    """The client went away before the model ran."""


class NotOfferedError(ServeError, status=501, code="UNIMPLEMENTED", reason="invalid"):
    """A part of the protocol that this server does not offer."""


class NotReadyError(ServeError, status=503, code="UNAVAILABLE", reason="not_ready", retry_after=1):
    """The server is draining, or the model is not loaded yet."""


class DeadlineError(ServeError, status=504, code="DEADLINE_EXCEEDED", reason="deadline"):
    """The request's own timeout passed, or would have before the model could answer."""
