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
    """MODEL as its source makes it today, in a process that can import what the caller can."""

    def __init__(self, artifact: Path, manifest: Manifest, model: str, options: VerifyOptions, *, folder: Path) -> None:
        """Starts the process.

        Args:
            artifact: The file that MODEL was exported to.
            manifest: Its manifest.
            model: MODEL.
            options: Its weights and operator libraries, and how long a call may take.
            folder: A private directory, for the process.
        """
        self._artifact = artifact
        self._manifest = manifest
        self._model = model
        self._options = options
        self._worker = Worker("exportkit.verify.eager_child", folder=folder, cwd=Path.cwd())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._worker.close()

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._worker.alive

    def resolve(self, device: str, *, required: bool) -> Verdict | None:
        """Makes the model on a device; why it cannot be compared with, if it cannot.

        Args:
            device: Such as "cuda:0".
            required: Whether it is a failure that there is no such model here.
        """
        source, options = self._manifest.source, self._options
        command = Resolve(
            artifact=str(self._artifact.absolute()),
            model=self._model,
            model_kwargs=source.model_kwargs,
            dtype=source.dtype,
            inputs=tuple(input_texts(self._manifest.call)),
            seed=source.seed,
            weights=str(options.weights.resolve()) if options.weights else None,
            libraries=tuple(str(Path(library).resolve()) for library in options.op_libraries),
            device=device,
        )
        timeout = max(options.timeout, LOAD_TIMEOUT)
        answer = self._worker.ask(command, Resolved, doing=f"making the eager model {self._model}", timeout=timeout)
        if isinstance(answer, Failed):
            if answer.error == "ModelNotFoundError":
                return EagerUnavailable(answer.detail, required)
            return EagerFailed(answer.error, answer.detail, f"making {self._model}")
        if isinstance(answer, Resolved):
            same = answer.state_sha256 == source.state_sha256
            return None if same else EagerDiffers(source.state_sha256, answer.state_sha256, self._model)
        return answer

    def draw(
        self, sizes: Mapping[str, int], *, label: str, seed: int, inputs: Path, outputs: Path
    ) -> Drawn | EagerFailed | Crashed | TimedOut:
        """Draws inputs of these sizes and has the model answer them; both are written to files."""
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
