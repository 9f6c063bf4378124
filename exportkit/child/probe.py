"""Finds out what an operator library registers, in a child process: a bad library ends the process that loads it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Literal

from exportkit.child.child_client import ChildClient, ChildEndedError
from exportkit.child.messages import Failed, Message
from exportkit.errors import LibraryLoadError

Kernels = Literal["cpu", "cuda", "any"]


class Probe(Message, frozen=True):
    """Asks the child to load libraries, one after the other. The answer is Probed."""

    libraries: tuple[str, ...]


class Registrations(Message, frozen=True):
    """What a library registers: the schemas of the operators that it defines, and its kernels, by the operator's name.

    A kernel's kind is `cpu`, `cuda`, or `any` for one that serves every device.
    """

    defines: dict[str, str]
    adds: dict[str, tuple[Kernels, ...]]

    @property
    def kernels(self) -> tuple[Kernels, ...]:
        """The kinds of all its kernels."""
        return tuple(sorted({kind for kinds in self.adds.values() for kind in kinds}))


class Probed(Message, frozen=True):
    """What each library registers that those before it did not."""

    libraries: tuple[Registrations, ...]


def registrations(*libraries: Path) -> tuple[Registrations, ...]:
    """Loads libraries into a child process, each after those that it needs, and returns what each of them registers.

    It takes as long as importing torch, once for the same files.

    Raises:
        LibraryLoadError: The dynamic linker refused a library (then without a hint), or a library raised an error or
            ended the process.
        HostError: No child process can be started.
    """
    files = tuple(path.resolve() for path in libraries)
    return _registrations(files, tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, files)))


@functools.lru_cache(maxsize=16)
def _registrations(libraries: tuple[Path, ...], state: tuple[tuple[int, int, int], ...]) -> tuple[Registrations, ...]:
    library = libraries[-1]
    with ChildClient("exportkit.child.probe_worker", search_path="installed") as child:
        try:
            answer = child.ask(Probe(tuple(map(str, libraries))), Probed)
        except ChildEndedError as error:
            hint = f"This shows why: python -c \"import torch; torch.ops.load_library('{library}')\""
            raise child.load_error(library.name, error, hint) from error
    if isinstance(answer, Failed):
        if answer.error == LibraryLoadError.__name__:
            raise LibraryLoadError(answer.message, hint=answer.hint)
        raise LibraryLoadError(f"{library.name} cannot be loaded: {answer.error}: {answer.message}")
    return answer.libraries
