"""Runs models in the C++ runtime (csrc/runtime), which is called through the dispatcher and does not hold the GIL.

torch's C++ API is stable within one minor version only, so each version needs its own build of the library. Without one
for the installed torch, torch's own binding is used.
"""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from exportkit.errors import HostError, UsageError
from exportkit.libraries import LIBRARY_DIR
from exportkit.package.archive import PackageReader
from exportkit.runtime.cache import Entry, callers_level
from exportkit.runtime.graphs import GraphUse
from exportkit.runtime.requests import Answers, TriedRows
from exportkit.runtime.targets import Choice
from exportkit.support import OLDEST_TORCH

_NAME = "libexportkit_runtime.so"


class RunnerOptions(NamedTuple):
    """How compiled code runs: how many calls at once, which as CUDA graphs, and the arguments that it writes."""

    runners: int = 1
    graphs: GraphUse = "none"
    written: tuple[int, ...] = ()


class NativeRunner:
    """Compiled code that runs without the GIL, so other Python threads continue."""

    def __init__(
        self,
        entry: Entry,
        choice: Choice,
        constants: Mapping[str, torch.Tensor],
        options: RunnerOptions,
    ) -> None:
        """Loads a target's library and runs its code, so the library must have been checked before.

        Besides the library, torch reads a `.json` that lists calls of custom operators, and opens files with CUDA
        kernels on their first call, so the entry stays in use. The external constants, on the CPU, are kept alive while
        the code may use them.

        Raises:
            RuntimeError: torch's loader refused the library, the constants do not fit the code, or there are no CUDA
                graphs here.
        """
        operators = torch.ops.exportkit
        names, tensors = list(constants), list(constants.values())
        device = torch.device(choice.device)
        self._handle = operators.open_target.default(
            str(entry.library), device, options.runners, options.graphs, names, tensors, list(options.written)
        )
        self._run = _function_of(operators.run.default)
        self._run_requests = _function_of(operators.run_requests.default)
        self._has_graphs = options.graphs != "none"
        self._entry = entry
        weakref.finalize(self, operators.close.default, self._handle)

    def run(self, inputs: list[torch.Tensor], refused: torch.Tensor | None = None, /) -> list[torch.Tensor]:
        """Returns the flat outputs for flat, valid inputs. Raises RuntimeError if the compiled code fails."""
        outputs: list[torch.Tensor] = self._run(self._handle, inputs, refused)
        return outputs

    def session_memory(self) -> torch.Tensor | None:
        """See `Runner.session_memory`."""
        memory: torch.Tensor | None = torch.ops.exportkit.session_memory.default(self._handle)
        return memory

    def look(self, refused: torch.Tensor | None = None, /) -> None:
        """See `Runner.look`."""
        torch.ops.exportkit.look.default(self._handle, refused)

    def run_requests(
        self,
        requests: Sequence[Sequence[torch.Tensor]],
        outputs: Sequence[int],
        /,
        states: Sequence[torch.Tensor] = (),
        written: Sequence[int] = (),
    ) -> Answers:
        """Runs requests together, without the GIL from the first step to the last. See `Model.run_requests`.

        With state, `states` has what the method uses of each request's session, of which `written` are written.
        """
        tensors = [tensor for request in requests for tensor in request]
        found = self._run_requests(self._handle, tensors, len(requests), list(outputs), list(states), list(written))
        return Answers(*found)

    def capture(self, arguments: list[torch.Tensor], own: int, /) -> list[torch.Tensor] | None:
        """Makes a graph for the arguments' sizes, and returns its own inputs. See `Runner.capture`."""
        if not self._has_graphs:
            return None
        owned: list[torch.Tensor] = torch.ops.exportkit.capture.default(self._handle, arguments, own)
        return owned

    def capture_as(self, other: NativeRunner, /) -> None:
        """Makes the graphs that were captured in another runner of the model. Raises RuntimeError if one cannot be."""
        if self._has_graphs:
            torch.ops.exportkit.capture_as.default(self._handle, other._handle)

    def graph_report(self) -> str | None:
        """Returns which graphs there are, as JSON; None without graphs."""
        return torch.ops.exportkit.graph_report.default(self._handle) if self._has_graphs else None


def try_rows(
    reader: PackageReader, target: str, device: torch.device, runners: Mapping[str, object], method: str, most: int
) -> TriedRows:
    """Finds out how many rows of several requests a call may have, at most so many: csrc/runtime/tried_rows.cpp.

    The runners are the target's code of every method, in the manifest's order. Raises RuntimeError.
    """
    native = [runner._handle for runner in runners.values() if isinstance(runner, NativeRunner)]
    if len(native) < len(runners):
        return TriedRows(0, reason="only the C++ runtime finds out whether rows influence one another")
    package = reader.handle  # it stays open until the call has ended
    return TriedRows(*torch.ops.exportkit.try_rows.default(int(package), target, device, native, method, most))


def _function_of(operator: Any) -> Callable[..., Any]:
    """Returns what an operator of torch calls, where it is known: its own method costs every call a third of a us."""
    function = getattr(operator, "_op", None)
    return function if callable(function) else operator


def use_native() -> bool:
    """Decides by $EXPORTKIT_RUNTIME whether to use the C++ runtime, and loads it.

    UsageError: it is not `auto`, `cpp` or `python`. HostError: it is `cpp`, and the runtime cannot be used here.
    """
    wanted = os.environ.get("EXPORTKIT_RUNTIME") or "auto"
    if wanted not in ("auto", "cpp", "python"):
        said = f"EXPORTKIT_RUNTIME must be auto, cpp or python, got {wanted!r}"
        raise UsageError(said, hint="auto uses the C++ runtime if it was built for the installed torch.")
    if wanted == "python":
        return False
    reason = why_unusable()
    if reason and wanted == "cpp":
        said = f"EXPORTKIT_RUNTIME is cpp, and the C++ runtime cannot be used with torch {torch.__version__}: {reason}"
        raise HostError(said, hint="`make build` builds it for the installed torch, and says what the build needs.")
    return not reason


def say_what_is_lost() -> None:
    """Warns that torch's own binding runs packages, if nobody chose it. A process says so once.

    Nothing is said where torch is too old: no package loads then, and the error says why.
    """
    reason = why_unusable()
    old = TorchVersion(str(torch.__version__)) < OLDEST_TORCH
    if reason and not old and os.environ.get("EXPORTKIT_RUNTIME") != "python":
        _warn(reason)


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"the C++ runtime cannot be used with torch {torch.__version__}: {reason}. torch's own binding runs packages: "
        "it holds the GIL during a call, so that Python's threads take turns, and it makes no CUDA graphs. "
        "`make build` builds the runtime for the installed torch; with EXPORTKIT_RUNTIME=python this is not said.",
        RuntimeWarning,
        stacklevel=callers_level(),
    )


def why_no_graphs() -> str | None:
    """Returns why the C++ runtime makes no CUDA graphs here, or None if it does."""
    if not use_native():
        return why_unusable() or "EXPORTKIT_RUNTIME is python, and torch's own binding makes none"
    return torch.ops.exportkit.why_no_graphs.default() or None


def library_path() -> Path:
    """Returns the path of the C++ runtime for the installed torch. The file may not exist."""
    return LIBRARY_DIR / f"torch{'.'.join(torch.__version__.split('.')[:2])}" / _NAME


def built_for() -> tuple[str, ...]:
    """Returns the versions of torch that the C++ runtime was built for, such as "2.13", the oldest first."""
    found = (path.parent.name.removeprefix("torch") for path in LIBRARY_DIR.glob(f"torch*/{_NAME}"))
    return tuple(sorted(found, key=lambda minor: tuple(map(int, minor.split(".")))))


def why_unusable() -> str | None:
    """Loads the C++ runtime. Returns the reason if that fails, else None."""
    return _load(library_path())


@functools.cache
def _load(library: Path) -> str | None:
    if not library.exists():
        built = ", ".join(built_for())
        return f"{library} does not exist; it was built for {f'torch {built}' if built else 'no torch'}"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"the dynamic linker refused it: {error.__cause__ or error}"
    return None
