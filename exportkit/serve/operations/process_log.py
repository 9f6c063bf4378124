"""What the server's own modules and uvicorn log: failures, on stderr, beside the access log."""

from __future__ import annotations

import logging


class IndentedFormatter(logging.Formatter):
    """Escapes what a client wrote, and indents every line but the first: none of it passes for another entry."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the entry's lines."""
        first, *others = super().format(record).split("\n")
        return "\n".join([_printable(first), *(f"  {_printable(line)}" for line in others)])


def log_failures() -> None:
    """Writes what is worse than a warning to stderr, and of warnings those that no client can cause."""
    handler = logging.StreamHandler()
    handler.setFormatter(IndentedFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of every client that does not speak HTTP


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
