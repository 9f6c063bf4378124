"""The messages between a repair and the process that traces and compiles. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exportkit.child.messages import Message
from exportkit.export.export_options import CompileOptions, TraceOptions
from exportkit.package.trust import Trust
from exportkit.reference_model import ReferenceModel, ReferenceModelFiles


class TraceModel(Message, frozen=True):
    """Tells the process to trace MODEL, as `exportkit export` does. The answer is ModelTraced.

    Attributes:
        model: MODEL.
        model_kwargs: The arguments of the callable that MODEL names.
        inputs: Example inputs.
        weights: The file of its weights.
        op_libraries: Operator libraries, as absolute paths, and names of modules.
        seed: The seed of weights and cases.
        keys: Who must have signed MODEL, if it is a file.
        signature: Its signature.
        trusted: Whether MODEL may be a file of torch.export.save, which is code of its author.
        output: The file that will be written.
        trace: How to trace.
        compiling: How to compile.
    """

    model: str
    model_kwargs: dict[str, bool | int | float | str | None]
    inputs: tuple[str, ...]
    weights: str | None
    op_libraries: tuple[str, ...]
    seed: int
    keys: tuple[str, ...]
    signature: str | None
    trusted: bool
    output: str
    trace: TraceOptions
    compiling: CompileOptions

    @classmethod
    def of(
        cls,
        model: str,
        output: Path,
        trace: TraceOptions,
        compiling: CompileOptions,
        *,
        model_kwargs: Mapping[str, Any] | None = None,
        inputs: Sequence[str] = (),
        weights: Path | None = None,
        op_libraries: Sequence[Path | str] = (),
        seed: int = 0,
        trust: Trust = Trust(),
        trusted: bool = False,
    ) -> TraceModel:
        """Describes what `exportkit.export.programs.resolve.resolve` takes, and the options, for another process."""
        eager = ReferenceModelFiles.of(ReferenceModel(weights=weights, op_libraries=op_libraries), model)
        return cls(
            model=model,
            model_kwargs=dict(model_kwargs or {}),
            inputs=tuple(inputs),
            weights=eager.weights,
            op_libraries=eager.libraries,
            seed=seed,
            keys=tuple(str(key) for key in trust.keys),
            signature=str(trust.signature.resolve()) if trust.signature else None,
            trusted=trusted,
            output=str(output.resolve()),
            trace=trace,
            compiling=compiling,
        )


class ModelTraced(Message, frozen=True):
    """What was traced.

    Attributes:
        manifest: The manifest without targets, as JSON.
        device: cpu or cuda.
        cpu_isa: The first instruction set to compile for.
        halves: Whether a value has a floating dtype of 16 bits or fewer.
        known: The names of the options that this torch has.
    """

    manifest: str
    device: str
    cpu_isa: str | None
    halves: bool
    known: tuple[str, ...]


class CompileModel(Message, frozen=True):
    """Tells the process to compile the traced model. The answer is ModelCompiled or NotCompiled.

    Attributes:
        inductor_config: Options of torch._inductor.config, in addition to those of `compiling`.
        eager_kernels: More operators that the code leaves to eager's kernels.
        output: The artifact to write.
    """

    inductor_config: dict[str, Any]
    eager_kernels: tuple[str, ...]
    output: str


class ModelCompiled(Message, frozen=True):
    """The artifact is written."""


class NotCompiled(Message, frozen=True):
    """The compiler failed.

    Attributes:
        message: How.
        operator: The operator that it failed at, if it said so.
        where: The line of the model's code, or "".
    """

    message: str
    operator: str | None
    where: str


class TimeCalls(Message, frozen=True):
    """Tells the process to time the example's calls, in turns. The answer is CallsTimed."""

    artifacts: tuple[str, ...]


class CallsTimed(Message, frozen=True):
    """Milliseconds of the calls: eager's, and each artifact's."""

    eager: float
    artifacts: tuple[float, ...]
