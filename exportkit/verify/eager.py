"""Runs the eager model in a separate process. eager_worker.py is the other side."""

from __future__ import annotations

from typing import Self

from exportkit.child.messages import Failed
from exportkit.package.manifest import Manifest
from exportkit.reference_model import ReferenceModelFiles, unnamed
from exportkit.verify.commands import CallsDrawn, CompareGradients, DrawCalls, EagerMade, GradientsCompared, MakeEager
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Crashed, EagerDiffers, EagerFailed, EagerUnavailable, TimedOut, Verdict
from exportkit.verify.verify_worker import LOAD_TIMEOUT, VerifyWorker


class EagerProcess:
    """MODEL, made from its current source on one device. The process can import what the caller can."""

    def __init__(
        self,
        manifest: Manifest,
        options: VerifyOptions,
        *,
        device: str,
        required: bool,
        demanded_by: str | None = None,
    ) -> None:
        """Does not start the process yet. `required`: a model that cannot be made is a failure."""
        self.model = options.eager.model_of(manifest.source.model, demanded_by)
        self._manifest = manifest
        self._options = options
        self._device = device
        self.required = required
        self._demanded_by = demanded_by
        self._worker: VerifyWorker | None = None
        self._begun = False
        self._objection: Verdict | None = None
        self._drawing: DrawCalls | None = None  # a command that was told and not heard

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._worker is not None:
            self._worker.close()

    @property
    def alive(self) -> bool:
        """Whether the process can take a command."""
        return self._worker is not None and self._worker.alive

    @property
    def made(self) -> bool:
        """Whether the model exists, or it was found that it cannot be made."""
        return self.alive and not self._begun

    def begin(self) -> None:
        """Begins to make the model if it does not exist yet. Others may work meanwhile; `make` waits for it."""
        if self.model is None or self._begun or self.alive:
            return
        source, options = self._manifest.source, self._options
        command = MakeEager(
            eager=ReferenceModelFiles.of(options.eager, self.model),
            source=source,
            methods=self._manifest.methods,
            state=self._manifest.state,
            tf32=self._manifest.provenance.tf32,
            device=self._device,
        )
        self._worker = VerifyWorker("exportkit.verify.eager_worker", search_path="caller")
        self._worker.tell(command)
        self._begun = True

    def make(self) -> Verdict | None:
        """Makes the model if it does not exist yet. Returns the problem if it cannot be compared with."""
        if self.model is None:
            return EagerUnavailable(unnamed(self._manifest.source.model, self._demanded_by), self.required)
        self.begin()
        if self._begun:
            self._begun, self._objection = False, self._made(self.model)
        return self._objection

    def _made(self, model: str) -> Verdict | None:
        assert self._worker is not None
        timeout, source = max(self._options.timeout, LOAD_TIMEOUT), self._manifest.source
        answer = self._worker.hear(EagerMade, doing=f"making the eager model {model}", timeout=timeout)
        if isinstance(answer, Failed):
            if answer.error == "ModelNotFoundError":
                named = self._options.eager.model is not None  # by the caller, who wants it compared
                return EagerUnavailable(answer.detail, self.required or named)
            return EagerFailed(answer.error, answer.detail, f"making {model}")
        if isinstance(answer, EagerMade):
            same = answer.state_sha256 == source.state_sha256
            return None if same else EagerDiffers(source.state_sha256, answer.state_sha256, model)
        return answer

    def draw(
        self, command: DrawCalls, *, label: str, then: DrawCalls | None = None
    ) -> CallsDrawn | EagerFailed | Crashed | TimedOut:
        """Draws calls, makes them, and writes a file like a recorded case's. Needs `make` first.

        `label` is for messages. The process begins with `then` at once.
        """
        assert self._worker is not None
        doing = f"running the eager model at {label}, which is inside the exported range"
        if self._drawing != command:
            self._worker.tell(command)
        answer = self._worker.hear(CallsDrawn, doing=doing, timeout=self._options.timeout)
        self._drawing = then if self.alive else None
        if self._drawing is not None:
            self._worker.tell(self._drawing)
        return EagerFailed(answer.error, answer.detail, doing) if isinstance(answer, Failed) else answer

    def gradients(
        self, command: CompareGradients, *, label: str
    ) -> GradientsCompared | EagerFailed | Crashed | TimedOut:
        """Compares gradients with differences. `label` names the comparison in messages. Needs `make` first."""
        assert self._worker is not None
        doing = f"comparing gradients with differences at {label}"
        answer = self._worker.ask(command, GradientsCompared, doing=doing, timeout=self._options.timeout)
        return EagerFailed(answer.error, answer.detail, doing) if isinstance(answer, Failed) else answer
