"""The packaged model in a process of its own: the parent's side of child.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import Self

from exportkit.child.messages import Failed
from exportkit.package.manifest import Manifest
from exportkit.verify.commands import ArtifactLoaded, CallModel, LoadArtifact, ModelCalled
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import CallFailed, Crashed, LoadFailed, MissingOperator, NotRun, TimedOut, Verdict
from exportkit.verify.verify_worker import LOAD_TIMEOUT, VerifyWorker

# What the process itself is made of: a MODEL such as torch.nn:Linear does not take it away.
_NEVER_BLOCKED = frozenset({"torch", "exportkit", "numpy", "safetensors", "msgspec", "typing_extensions"})
_MAX_DEAD = 2  # processes that may die before the remaining calls are given up


class ReplayProcess:
    """A target of an artifact, loaded where neither the exporter nor the model's or operators' source can be imported.

    Where the process dies of a call, another one takes its place for the next.
    """

    def __init__(
        self,
        artifact: Path,
        manifest: Manifest,
        options: VerifyOptions,
        *,
        target: str | None,
        device: str,
        folder: Path,
        libraries: Mapping[Path, Sequence[str]] | None = None,
        unsigned: str | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            artifact: The file.
            manifest: Its manifest.
            options: Who must have signed it, what it must do without, and how long a call may take.
            target: Of its targets, the one to run; None for its exported program.
            device: Where it runs.
            folder: A private directory, for the process.
            libraries: Operator libraries that the artifact does not bring, each with the namespaces it defines.
            unsigned: As `verify` takes it.
        """
        keys = tuple(str(key.absolute()) for key in options.public_keys)
        self._command = LoadArtifact(
            artifact=str(artifact.absolute()),
            target=target,
            device=device,
            tf32=manifest.provenance.tf32,
            libraries=tuple((str(library), tuple(names)) for library, names in (libraries or {}).items()),
            blocked=blocked(options.model or manifest.source.model),
            public_keys=keys or None,
            signature=str(options.signature.absolute()) if options.signature else None,
            unsigned=unsigned,
        )
        self._timeout = options.timeout
        self._folder = folder
        self._worker: VerifyWorker | None = None
        self._dead = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._worker is not None:
            self._worker.close()

    def load(self) -> ArtifactLoaded | Verdict:
        """Starts a process and loads the artifact in it; what went wrong, if something did."""
        self._worker = VerifyWorker("exportkit.verify.replay_worker", search_path="installed")
        timeout = max(self._timeout, LOAD_TIMEOUT)
        answer = self._worker.ask(self._command, ArtifactLoaded, doing="loading the artifact", timeout=timeout)
        return _load_failure(answer) if isinstance(answer, Failed) else answer

    def call(self, inputs: Path, outputs: Path, *, doing: str) -> ModelCalled | Verdict:
        """Calls the model with the tensors of a file; what it returns is written to another.

        Args:
            inputs: A safetensors file with `input.<i>`.
            outputs: Gets `output.<i>`.
            doing: What this call is, for the messages.
        """
        if self._worker is None or not self._worker.alive:
            if self._dead >= _MAX_DEAD:
                return NotRun(f"{self._dead} processes died in earlier calls")
            if not isinstance(loaded := self.load(), ArtifactLoaded):
                return loaded
        assert self._worker is not None
        answer = self._worker.ask(CallModel(str(inputs), str(outputs)), ModelCalled, doing=doing, timeout=self._timeout)
        if isinstance(answer, (Crashed, TimedOut)):
            self._dead += 1
        if isinstance(answer, Failed):
            # Some operators' messages reach stderr only: torch's C interface drops them.
            return CallFailed(answer.error, "\n".join(filter(None, [answer.detail, self._worker.printed()])))
        return answer


def blocked(model: str | None) -> tuple[str, ...]:
    """The top-level package of MODEL, which the replay process must do without."""
    if model is None or ":" not in model or model.partition(":")[0].endswith(".py"):
        return ()
    top = model.partition(":")[0].partition(".")[0]
    return () if top in _NEVER_BLOCKED else (top,)


def _load_failure(answer: Failed) -> Verdict:
    """Why the artifact could not be loaded."""
    # What our loader says where an operator is neither in a library of the package nor registered otherwise; and torch.
    pattern = r"operator ([\w:.]+) is not loaded|Could not find schema for ([\w:.]+?)\.?(?:\s|$)"
    if missing := re.search(pattern, answer.detail):
        return MissingOperator(missing[1] or missing[2], answer.detail)
    # An error that is none of exportkit's comes from torch's loader: it did not understand what it was given.
    return LoadFailed(answer.error, answer.detail, answer.exit_code or 3)
