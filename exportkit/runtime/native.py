"""The C++ runtime (csrc/runtime), called through the dispatcher: it opens, checks and runs packages without the GIL.

It uses torch's C++ API, which holds for one minor version only, so there is one library for each version it was built
with, and Python's own route where there is none for the torch that is installed.
"""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from typing_extensions import Self

from exportkit import errors, libraries
from exportkit.errors import HostError, UsageError
from exportkit.libraries import LIBRARY_DIR
from exportkit.package.manifest import Library
from exportkit.runtime.targets import Choice

_NAME = "libexportkit_runtime.so"


class NativeRunner:
    """Compiled code that is run without the GIL: other threads of Python go on meanwhile."""

    def __init__(self, handle: int) -> None:
        """Takes over what the C++ runtime has loaded under this number."""
        operators = torch.ops.exportkit
        self._handle = handle
        self._run = operators.run.default
        weakref.finalize(self, operators.close.default, handle)

    @classmethod
    def open(cls, library: Path, choice: Choice, runners: int, constants: Mapping[str, torch.Tensor]) -> Self:
        """Loads a target's library, which must have been checked: this executes it.

        Args:
            library: The file.
            choice: The target.
            runners: How many calls can run at a time.
            constants: What the code takes from outside, on the CPU; kept alive as long as the code may use it.

        Raises:
            RuntimeError: torch's loader refused it, or the constants are not the code's.
        """
        device = torch.device(choice.device)
        names, tensors = list(constants), list(constants.values())
        return cls(torch.ops.exportkit.open_target.default(str(library), device, runners, names, tensors))

    def run(self, inputs: list[torch.Tensor], /) -> list[torch.Tensor]:
        """The flat outputs for flat inputs that the package allows.

        Raises:
            RuntimeError: The compiled code failed.
        """
        outputs: list[torch.Tensor] = self._run(self._handle, inputs)
        return outputs


class NativePackage:
    """A package that the C++ runtime opened and checked as `exportkit.load` does; nothing of it was executed yet.

    Close it, once its target is loaded or cannot be.

    Attributes:
        file: What was checked, open once more; the caller's to close.
        manifest_sha256: Of the manifest that it read.
        target: The name of the target that it chose.
        device: Where that runs, as torch names it.
    """

    def __init__(
        self,
        path: str,
        device: str,
        target: str | None,
        runners: int,
        public_keys: list[str],
        signature: str,
        *,
        again: bool,
    ) -> None:
        """Opens it; arguments and errors are those of `exportkit.load`, an empty `signature` is none."""
        self._handle, self.file, self.manifest_sha256, self.target, self.device, error = (
            torch.ops.exportkit.open_package.default(path, device, target, runners, public_keys, signature, again)
        )
        _raise(error)

    def load_operators(self, described: Sequence[Library]) -> None:
        """Loads the operator libraries of the target, and checks the operators of the graph.

        Args:
            described: Those libraries, as the manifest has them.
        """
        by_digest = {library.sha256: library for library in described}
        with libraries.loading:
            for known in libraries.loaded_libraries():
                # Made readable, since the dispatcher takes text only.
                path = os.fsencode(known.path).decode(errors="backslashreplace")
                torch.ops.exportkit.know_library.default(known.sha256, path, list(known.namespaces))
            left = True
            while left:
                loaded, left, warned, error = torch.ops.exportkit.load_operators.default(
                    self._handle, list(libraries.TORCH_NAMESPACES)
                )
                for sha256, path, namespaces in zip(loaded[::3], loaded[1::3], loaded[2::3]):
                    library = libraries.LoadedLibrary(Path(path), sha256, frozenset(namespaces.split()))
                    libraries.know_library(library)
                _warn(warned)
                _raise(error)
                if left:
                    # It may define more than the manifest says, which takes another Python process to find out.
                    sha256, unpacked = left
                    schemas = {operator.name: operator.schema for operator in by_digest[sha256].defines}
                    defines = {name.partition("::")[0] for name in schemas}
                    libraries.load_verified(Path(unpacked), sha256, defines=defines, schemas=schemas)

    def load_target(self) -> NativeRunner:
        """Loads the target's code, which executes it."""
        handle, warned, error = torch.ops.exportkit.load_target.default(self._handle)
        _warn(warned)
        _raise(error)
        return NativeRunner(handle)

    def close(self) -> None:
        """Lets go of what was opened to load it; what is loaded stays."""
        torch.ops.exportkit.close_package.default(self._handle)


def _warn(messages: Sequence[str]) -> None:
    for message in messages:
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _raise(error: Sequence[str]) -> None:
    """Raises what the C++ runtime says went wrong: class, message and hint; nothing where nothing did."""
    if not error:
        return
    kind, message, hint = error
    if kind == OSError.__name__:
        raise OSError(message)
    raise getattr(errors, kind)(message, hint=hint or None)


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
