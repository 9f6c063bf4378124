"""The eager model in a process of its own: the parent's side of eager_child.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from exportkit.package.manifest import Call, Manifest
from exportkit.package.sizes import shape_at
from exportkit.verify.messages import Draw, Drawn, Failed, Resolve, Resolved
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Crashed, EagerDiffers, EagerFailed, EagerUnavailable, TimedOut, Verdict
from exportkit.verify.worker import LOAD_TIMEOUT, Worker


class EagerProcess:
    """MODEL as its source makes it today, on one device, in a process that can import what the caller can."""

    def __init__(
        self, artifact: Path, manifest: Manifest, options: VerifyOptions, *, device: str, folder: Path, required: bool
    ) -> None:
        """Starts nothing yet.

        Args:
            artifact: The file that MODEL was exported to.
            manifest: Its manifest, which names MODEL unless the options do.
            options: MODEL's weights and operator libraries, and how long a call may take.
            device: Where it runs, such as "cuda:0".
            folder: A private directory, for the process.
            required: Whether it is a failure that there is no such model here.
        """
        self.model = options.model or manifest.source.model
        self._artifact = artifact
        self._manifest = manifest
        self._options = options
        self._device = device
        self._folder = folder
        self.required = required
        self._worker: Worker | None = None
        self._objection: Verdict | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.close()

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._worker is not None and self._worker.alive

    def make(self) -> Verdict | None:
        """Makes the model, unless it is there already; why it cannot be compared with, if it cannot."""
        if not self.alive:
            self._objection = self._start()
        return self._objection

    def _start(self) -> Verdict | None:
        if self.model is None:
            reason = "the artifact was exported from an object, not from a MODEL that can be imported; name it: --model"
            return EagerUnavailable(reason, self.required)
        source, options = self._manifest.source, self._options
        command = Resolve(
            artifact=str(self._artifact.absolute()),
            model=self.model,
            model_kwargs=source.model_kwargs,
            dtype=source.dtype,
            inputs=tuple(input_texts(self._manifest.call)),
            seed=source.seed,
            weights=str(options.weights.resolve()) if options.weights else None,
            libraries=tuple(str(Path(library).resolve()) for library in options.op_libraries),
            device=self._device,
        )
        self._worker = Worker("exportkit.verify.eager_child", folder=self._folder, cwd=Path.cwd())
        timeout = max(options.timeout, LOAD_TIMEOUT)
        answer = self._worker.ask(command, Resolved, doing=f"making the eager model {self.model}", timeout=timeout)
        if isinstance(answer, Failed):
            if answer.error == "ModelNotFoundError":
                return EagerUnavailable(answer.detail, self.required)
            return EagerFailed(answer.error, answer.detail, f"making {self.model}")
        if isinstance(answer, Resolved):
            same = answer.state_sha256 == source.state_sha256
            return None if same else EagerDiffers(source.state_sha256, answer.state_sha256, self.model)
        return answer

    def draw(
        self, sizes: Mapping[str, int], *, label: str, seed: int, inputs: Path, outputs: Path
    ) -> Drawn | EagerFailed | Crashed | TimedOut:
        """Draws inputs of these sizes and has the model, once made, answer them; both are written to files."""
        assert self._worker is not None
        doing = f"running the eager model at {label}, which is inside the exported range"
        command = Draw(dict(sizes), seed, str(inputs), str(outputs))
        answer = self._worker.ask(command, Drawn, doing=doing, timeout=self._options.timeout)
        return EagerFailed(answer.error, answer.detail, doing) if isinstance(answer, Failed) else answer


def input_texts(call: Call) -> list[str]:
    """The tensors of a call as --input has them, for parameters that are one tensor each."""
    # Their values are what inputs of other sizes are drawn from, so there should be some.
    sizes = {dimension.name: min(max(dimension.min, 8), dimension.max) for dimension in call.dimensions}
    return [
        f"{tensor.name}={tensor.dtype}{shape_at(tensor, sizes)}" for tensor in call.inputs if "." not in tensor.name
    ]
