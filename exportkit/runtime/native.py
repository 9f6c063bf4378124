"""The C++ runtime (csrc/runtime), called through the dispatcher: it loads and runs compiled code without the GIL.

It uses torch's C++ API, which holds for one minor version only, so there is one library for each version it was built
with, and Python's own route where there is none for the torch that is installed.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from exportkit.errors import HostError, UsageError
from exportkit.libraries import LIBRARY_DIR
from exportkit.runtime.targets import Choice

_NAME = "libexportkit_runtime.so"


class NativeRunner:
    """Compiled code that is run without the GIL: other threads of Python go on meanwhile."""

    def __init__(self, library: Path, choice: Choice, runners: int, constants: Mapping[str, torch.Tensor]) -> None:
        """Loads a target's library, which must have been checked: this executes it.

        Args:
            library: The file.
            choice: The target.
            runners: How many calls can run at a time.
            constants: What the code takes from outside, on the CPU; kept alive as long as the code may use it.

        Raises:
            RuntimeError: torch's loader refused it, or the constants are not the code's.
        """
        operators = torch.ops.exportkit
        self._handle: int = operators.open_target.default(
            str(library), torch.device(choice.device), runners, list(constants), list(constants.values())
        )
        self._run = operators.run.default
        weakref.finalize(self, operators.close.default, self._handle)

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """The flat outputs for flat inputs that the package allows.

        Raises:
            RuntimeError: The compiled code failed.
        """
        outputs: list[torch.Tensor] = self._run(self._handle, inputs)
        return outputs


def use_native() -> bool:
    """Whether compiled code is run by the C++ runtime, which is loaded then. $EXPORTKIT_RUNTIME decides.

    Raises:
        UsageError: $EXPORTKIT_RUNTIME is none of `auto`, `cpp` and `python`.
        HostError: It asks for the C++ runtime, which is not there for this torch.
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
    except OSError as error:  # what it needs of the host is not there, such as OpenSSL
        return f"the dynamic linker refused it: {error.__cause__ or error}"
    operators = torch.ops.exportkit
    # A fork waits until no thread is in the middle of a call, which would never end there.
    os.register_at_fork(
        before=operators.before_fork.default,
        after_in_parent=lambda: operators.after_fork.default(False),
        after_in_child=lambda: operators.after_fork.default(True),
    )
    return None
