"""Compiles a traced model while its cases are recorded: in a fork, which puts the code into the cache.

What comes after finds the code there. Where the fork fails, that compiles the model itself, and says what is wrong.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

import torch

from exportkit.child.template import end_with
from exportkit.export.aot_inductor import compile_program
from exportkit.export.compile_plan import CompilePlan
from exportkit.export.host_copies import HostCopies
from exportkit.export.program_weights import ProgramWeights
from exportkit.export.traced import TracedMethod
from exportkit.package.atomic import temporary_folder
from exportkit.progress import Progress, note_with, silent

MOST_BYTES = 256 << 20
"""Of weights. Recording cases of larger models takes all cores, and as much memory again."""

PATIENCE = 20.0
"""So many seconds a fork is waited for that does nothing."""


class CompiledBeside:
    """A fork that compiles what a plan says, if that pays. It ends with the context."""

    def __init__(self, plan: CompilePlan, *, tf32: bool) -> None:
        """Takes the plan, and whether the code may use TF32."""
        self._plan, self._tf32 = plan, tf32
        self._pid: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pid is not None:
            for end in (os.killpg, os.kill):  # it may not have a group yet
                with suppress(ProcessLookupError):
                    end(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = None

    def begin(self, methods: Sequence[TracedMethod]) -> None:
        """Begins to compile, if a core is free for that and the code will be found."""
        plan, weights = self._plan, [tensor for each in methods for tensor in each.program.state_dict.values()]
        here = plan.beside and plan.cache and plan.device.type == "cpu" and not plan.gpus
        if not here or len(os.sched_getaffinity(0)) < 2 or sum(tensor.nbytes for tensor in weights) > MOST_BYTES:
            return
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of threads, which are torch's
            pid = os.fork()
        if pid:
            self._pid = pid
        else:
            self._work(methods, parent)

    def wait(self, progress: Progress) -> None:
        """Waits for the fork, but not for one that does nothing: a lock that another thread had when it was forked."""
        if self._pid is None:
            return
        progress("waiting for the compiler, which began when the model was traced")
        ended, before = os.pidfd_open(self._pid), None
        try:
            while not select.select([ended], [], [], PATIENCE)[0] and (now := _work_of(self._pid)) != before:
                before = now
        finally:
            os.close(ended)
        self.__exit__()

    def _work(self, methods: Sequence[TracedMethod], parent: int) -> NoReturn:
        try:
            os.setsid()
            end_with(parent)
            faulthandler.disable()  # a crash is the parent's to tell, which will compile, too
            note_with(lambda step, node: None)
            nothing = os.open(os.devnull, os.O_RDWR)
            for standard in (1, 2):
                os.dup2(nothing, standard)
            plan, threads = self._plan, torch.get_num_threads()
            torch.set_num_threads(1)  # OpenMP's threads are the parent's
            torch.get_num_threads = lambda: threads  # for which the code is
            programs = [method.program for method in methods]
            weights = None if plan.embed_weights else ProgramWeights(programs, HostCopies())
            with temporary_folder(None, "exportkit-compile") as folder:
                for isa, gpu in plan.parts:
                    for method in methods:
                        place = folder / f"{isa}-{method.name}"
                        compile_program(
                            method, place, plan, isa, gpu, weights=weights, tf32=self._tf32, progress=silent
                        )
        finally:
            os._exit(0)


def _work_of(session: int) -> list[tuple[str, list[str]]]:
    """Returns the time that each process of a session has had on a core."""
    found = []
    for process in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = process.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append((process.parent.name, fields[11:15]))
    return found
