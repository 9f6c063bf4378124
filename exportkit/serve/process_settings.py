"""Whether a process can serve, and its settings: of its memory, of Python's lock, and of its log."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from importlib.util import find_spec

from exportkit.errors import HostError

# Numbers of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8

_MMAP_BYTES = 32 << 20  # the most that glibc allows
_KEPT_BYTES = 256 << 20
_SWITCH_SECONDS = 1e-4

_SERVE = ("uvicorn", "httptools", "uvloop", "starlette", "prometheus_client", "grpc", "google.protobuf")
_TRACES = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.instrumentation.asgi",
    "opentelemetry.instrumentation.grpc",
)


def keep_freed_memory() -> bool:
    """Lets glibc keep up to 256 MiB of freed memory at the end of its heap. Returns whether it does.

    By default it returns what a request used to the system, and the system gives the next request new pages, each of
    which costs a fault: more than a body's copies. Memory that is asked for in pieces above 32 MiB is always returned.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    # The heaps of further threads, such as runners, are given back by another rule. So all threads use one heap.
    settings = ((_MMAP_THRESHOLD, _MMAP_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_ARENAS, 1))
    return all(mallopt(*setting) for setting in settings)


def give_freed_memory_back() -> None:
    """Returns freed memory to the system, which `keep_freed_memory` keeps: after a model was closed, it is a lot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def shorten_switch_interval() -> None:
    """Lets a thread that works give Python's lock to one that waits for it after 0.1 ms, instead of 5 ms.

    A runner that comes back from the model waits for the event loop, longer by far than it then needs the lock.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


def collect_requests() -> None:
    """Lets Python look for garbage often, and only in what is made from now on. Call it once the models are loaded.

    The command line collects rarely, because importing torch makes objects and no garbage. In a server a cycle of
    objects may hold a body of a GB, and waiting for a hundred thousand further objects would hold many of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 10)  # Python's own


def check_installed(*, traces: bool) -> None:
    """Imports nothing.

    Args:
        traces: Whether traces are asked for.

    Raises:
        HostError: A package is missing. The hint says what installs it.
    """
    for extra, modules in [("serve", _SERVE), *([("traces", _TRACES)] if traces else [])]:
        for module in modules:
            if not _is_there(module):
                what = "`--traces` needs" if extra == "traces" else "`exportkit serve` needs"
                raise HostError(
                    f"{what} the Python package {module}, which is not installed",
                    hint=f"Run `pip install 'exportkit[{extra}]'`.",
                )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


class IndentedFormatter(logging.Formatter):
    """Escapes what a client wrote, and indents every line but the first: none of it passes for another entry."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the entry's lines."""
        first, *others = super().format(record).split("\n")
        return "\n".join([_printable(first), *(f"  {_printable(line)}" for line in others)])


def log_failures() -> None:
    """Writes warnings, which no client can cause, and what is worse to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(IndentedFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
