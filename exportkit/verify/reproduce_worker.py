"""The process that runs a file that was written for a report, and lets torch's own bisector name the cause."""

from __future__ import annotations

import contextlib
import io
import runpy
import socket
from collections.abc import Callable

import torch
from torch._inductor import config

from exportkit.child.messages import serve
from exportkit.child.offline import go_offline
from exportkit.verify.bisect_commands import CauseNamed, NameCause, ReproductionRan, RunReproduction

_NOT_FOUND = "torch's own bisector names no part of the compiler"


def run(command: RunReproduction) -> ReproductionRan:
    """Runs a file's comparison."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        differs = _comparison(command.file)()
    return ReproductionRan(differs, printed.getvalue())


def name_cause(command: NameCause) -> CauseNamed:
    """Compiles a file's function again and again, each time without a part of the compiler."""
    try:  # it is private to torch
        from torch._inductor.compiler_bisector import CompilerBisector

        bisect = CompilerBisector.do_bisect
    except (ImportError, AttributeError):
        return CauseNamed(f"torch {torch.__version__} has no bisector of its compiler (CompilerBisector)")
    differs = _comparison(command.file)
    with contextlib.redirect_stdout(io.StringIO()):
        found = bisect(lambda: not differs())
    if found is None:
        return CauseNamed(_NOT_FOUND)
    parts = [found.backend, found.subsystem, found.debug_info if found.debug_info != found.subsystem else None]
    return CauseNamed("torch's own bisector names " + ", ".join(part for part in parts if part))


def _comparison(file: str) -> Callable[[], bool]:
    differs: Callable[[], bool] = runpy.run_path(file)["differs"]
    return differs


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    go_offline()
    config.cpp.vec_isa_ok = True  # otherwise Inductor compiles a program for each instruction set, to try it
    serve(connection, {RunReproduction: run, NameCause: name_cause})
