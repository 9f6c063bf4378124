"""The observers that options ask for: the access log and the traces."""

from __future__ import annotations

import sys
from collections.abc import Callable

from exportkit.serve.operations.access_log import AccessLog
from exportkit.serve.operations.line_writer import LineWriter
from exportkit.serve.operations.observation import Observer
from exportkit.serve.serve_options import ServeOptions

_LOG_SECONDS = 2.0


def observers_of(
    options: ServeOptions, lines_lost: Callable[[int], None]
) -> tuple[list[Observer], list[Callable[[], None]]]:
    """Returns the observers, and functions that write or send at the end what they still hold.

    Args:
        options: The server's.
        lines_lost: Gets the number of lines of the log that could not be written. Any thread may call it.
    """
    observers: list[Observer] = []
    closing: list[Callable[[], None]] = []
    if options.access_log:
        writer = LineWriter(sys.stderr.fileno(), lines_lost)
        closing.append(lambda: writer.close(_LOG_SECONDS))
        observers.append(AccessLog(writer))
    if options.traces is not None:
        from exportkit.serve.operations.tracing import traces_to  # its packages are an extra

        traces = traces_to(options.traces)
        closing.append(traces.close)
        observers.append(traces)
    return observers, closing
