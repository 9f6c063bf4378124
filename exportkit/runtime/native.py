"""The C++ runtime (csrc/runtime) as a runner: called through the dispatcher, it runs models without the GIL.

It uses torch's C++ API, which holds for one minor version only, so there is one library for each version it was built
with, and torch's own binding takes its place where there is none for the torch that is installed.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from exportkit import libraries
from exportkit.errors import HostError, UsageError
from exportkit.libraries import LIBRARY_DIR
from exportkit.runtime.cache import Entry
from exportkit.runtime.targets import Choice

_NAME = "libexportkit_runtime.so"


class NativeRunner:
    """Compiled code that is run without the GIL: other threads of Python go on meanwhile."""

    def __init__(self, entry: Entry, choice: Choice, runners: int, constants: Mapping[str, torch.Tensor]) -> None:
        """Loads a target's library, which must have been checked: this executes it.

        Args:
            entry: The target's files. torch finds the calls of custom operators in a `.json` beside the library, and
                CUDA kernels in files there, which it opens when they are first called: they stay in use.
            choice: The target.
            runners: How many calls can run at a time.
            constants: What the code takes from outside, on the CPU; kept alive as long as the code may use it.

        Raises:
            RuntimeError: torch's loader refused it, or the constants are not the code's.
        """
        operators = torch.ops.exportkit
        names, tensors = list(constants), list(constants.values())
        device = torch.device(choice.device)
        self._handle = operators.open_target.default(str(entry.library), device, runners, names, tensors)
        self._run = operators.run.default
        self._entry = entry
        weakref.finalize(self, operators.close.default, self._handle)

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """The flat outputs for flat inputs that the package allows: RuntimeError where the compiled code failed."""
        outputs: list[torch.Tensor] = self._run(self._handle, inputs)
        return outputs


def use_native() -> bool:
    """Whether compiled code is run by the C++ runtime, which is loaded then. $EXPORTKIT_RUNTIME decides.

    UsageError: it is none of `auto`, `cpp` and `python`. HostError: it asks for what was not built for this torch.
    """
    wanted = os.environ.get("EXPORTKIT_RUNTIME") or "auto"
    if wanted not in ("auto", "cpp", "python"):
        raise UsageError(
            f"EXPORTKIT_RUNTIME must be auto, cpp or python, got {wanted!r}",
            hint="auto takes the C++ runtime where it was built for the torch that is installed.",
        )
    if wanted == "python":
        return False
    reason = _load(library_path())
    if reason and wanted == "cpp":
        raise HostError(
            f"EXPORTKIT_RUNTIME is cpp, and the C++ runtime cannot be used with torch {torch.__version__}: {reason}",
            hint="`make build` builds it for the torch that is installed, and says what it needs.",
        )
    return not reason


def library_path() -> Path:
    """Where the C++ runtime for the installed torch is, if it was built."""
    return LIBRARY_DIR / f"torch{'.'.join(torch.__version__.split('.')[:2])}" / _NAME


@functools.cache
def _load(library: Path) -> str | None:
    """Why the library cannot be used, or None where it is loaded."""
    if not library.exists():
        return f"there is no {library}"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"the dynamic linker refused it: {error.__cause__ or error}"
    libraries.list_namespaces = lambda: set(torch.ops.exportkit.namespaces.default())
    return None
