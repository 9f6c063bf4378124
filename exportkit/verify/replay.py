"""Runs the packaged model in a separate process. replay_worker.py and onnx_worker.py are the other side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

from exportkit.child.messages import Failed, Message
from exportkit.installed import declared_modules
from exportkit.onnx.files import model_paths
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Manifest
from exportkit.verify.commands import (
    ArtifactLoaded,
    CallModel,
    LoadArtifact,
    LoadOnnx,
    ModelCalled,
    SessionReady,
    UseSession,
)
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import CallFailed, Crashed, LoadFailed, MissingOperator, NotRun, TimedOut, Verdict
from exportkit.verify.verify_worker import LOAD_TIMEOUT, VerifyWorker

# The process itself needs these, so a MODEL such as torch.nn:Linear does not block them.
_NEVER_BLOCKED = frozenset({"torch", "exportkit", "numpy", "safetensors", "msgspec", "typing_extensions"})
_WORKERS: Mapping[type[Message], str] = {
    LoadArtifact: "exportkit.verify.replay_worker",
    LoadOnnx: "exportkit.verify.onnx_worker",
}
M = TypeVar("M", bound=Message)

_MAX_DEAD = 2  # processes that may die before the remaining calls are skipped


class ReplayProcess:
    """Runs a target or an ONNX model in a process that cannot import the exporter, or the model's or operators' source.

    If a call kills the process, the next call starts another.
    """

    def __init__(self, command: LoadArtifact | LoadOnnx, timeout: float) -> None:
        """Does not start the process yet."""
        self._command = command
        self._timeout = timeout
        self._worker: VerifyWorker | None = None
        self._dead = 0

    @classmethod
    def of_target(
        cls,
        artifact: Path,
        manifest: Manifest,
        options: VerifyOptions,
        *,
        target: str | None,
        device: str,
        libraries: Mapping[Path, Sequence[str]] | None = None,
        unsigned: str | None = None,
    ) -> Self:
        """The process of a target, which torch runs.

        The program runs if there is no target. The artifact does not contain the libraries, which are given with the
        namespaces that each defines.
        """
        keys, signature = options.trust.keys, options.trust.signature
        command = LoadArtifact(
            artifact=str(artifact.absolute()),
            target=target,
            device=device,
            tf32=manifest.provenance.tf32,
            libraries=tuple((str(library), tuple(names)) for library, names in (libraries or {}).items()),
            blocked=blocked(options.eager.model or manifest.source.model),
            public_keys=tuple(str(Path(key).absolute()) for key in keys),
            signature=str(signature.absolute()) if signature else None,
            unsigned=unsigned,
        )
        return cls(command, options.timeout)

    @classmethod
    def of_onnx(cls, model: Path, sidecar: PackageReader, options: VerifyOptions) -> Self:
        """The process of an ONNX model, which ONNX Runtime runs: of several methods, the models of all."""
        manifest = sidecar.manifest
        paths = model_paths(sidecar) or {manifest.methods[0].name: model}
        command = LoadOnnx(
            sidecar=str(sidecar.path.absolute()),
            manifest_sha256=sidecar.manifest_sha256,
            models={method: str(path.absolute()) for method, path in paths.items()},
            blocked=blocked(options.eager.model or manifest.source.model),
        )
        return cls(command, options.timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._worker is not None:
            self._worker.close()

    def start(self) -> VerifyWorker:
        """Starts a process, which begins to load the artifact. `load` waits for it."""
        kind = type(self._command)
        self._worker = VerifyWorker(_WORKERS[kind], search_path="installed", with_torch=kind is LoadArtifact)
        self._worker.tell(self._command)
        return self._worker

    def load(self) -> ArtifactLoaded | Verdict:
        """Loads the artifact in a process, which `start` may have started. Returns a verdict if that fails."""
        worker = self._worker or self.start()
        timeout = max(self._timeout, LOAD_TIMEOUT)
        answer = worker.hear(ArtifactLoaded, doing="loading the artifact", timeout=timeout)
        return _load_failure(answer) if isinstance(answer, Failed) else answer

    def call(self, command: CallModel, *, doing: str) -> ModelCalled | Verdict:
        """Tells the process to call the model. Messages say what it was doing."""
        return self._ask(command, ModelCalled, doing)

    def use(self, command: UseSession, *, doing: str) -> SessionReady | Verdict:
        """Tells the process to open, copy, change, read or close a session. A new process has none."""
        return self._ask(command, SessionReady, doing)

    def _ask(self, command: Message, kind: type[M], doing: str) -> M | Verdict:
        if self._worker is None or not self._worker.alive:
            if self._dead >= _MAX_DEAD:
                return NotRun(f"{self._dead} processes died in earlier calls")
            self.start()
            if not isinstance(loaded := self.load(), ArtifactLoaded):
                return loaded
        assert self._worker is not None
        answer = self._worker.ask(command, kind, doing=doing, timeout=self._timeout)
        if isinstance(answer, (Crashed, TimedOut)):
            self._dead += 1
        if isinstance(answer, Failed):
            # Some operators' messages reach stderr only: torch's C interface drops them.
            return CallFailed(answer.error, "\n".join(filter(None, [answer.detail, self._worker.printed()])))
        return answer


def blocked(model: str | None) -> tuple[str, ...]:
    """Returns what the replay process must not import: what packages declare, and MODEL's top-level package."""
    declared = (*declared_modules(),)
    if model is None or ":" not in model or model.partition(":")[0].endswith(".py"):
        return declared
    top = model.partition(":")[0].partition(".")[0]
    return declared if top in _NEVER_BLOCKED else (*declared, top)


def _load_failure(answer: Failed) -> Verdict:
    # The messages of exportkit's loader, of torch and of ONNX Runtime for an operator that is not registered.
    pattern = (
        r"operator ([\w:.]+) is not loaded|Could not find schema for ([\w:.]+?)\.?(?:\s|$)"
        r"|(\S+)\(-?\d+\) is not a registered function/op"
    )
    if missing := re.search(pattern, answer.detail):
        return MissingOperator(missing[1] or missing[2] or missing[3], answer.detail)
    # Other errors come from torch's loader, which could not read the package.
    return LoadFailed(answer.error, answer.detail, answer.exit_code or 3)
