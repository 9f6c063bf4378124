"""Plans what a verification runs: the targets of an artifact, and the libraries that it does not contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exportkit.errors import UsageError
from exportkit.export.models.find_libraries import describe_libraries
from exportkit.onnx.files import refuse_sidecar
from exportkit.package.archive import PackageReader
from exportkit.package.consistency import operators_of
from exportkit.package.manifest import Manifest
from exportkit.progress import Progress
from exportkit.runtime.targets import host_for, named, parse_device, survey_package
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import MissingOperator
from exportkit.verify.report import TargetReport

ONNX = "onnx"  # stands where a target's name does


@dataclass(frozen=True)
class TargetRun:
    """A target and its device. The target is None for an exported program, and for an ONNX model."""

    target: str | None
    device: str
    onnx_model: Path | None = None

    @property
    def name(self) -> str:
        """The name in reports."""
        return self.target or ("program" if self.onnx_model is None else ONNX)


def onnx_run(model: Path, options: VerifyOptions) -> tuple[list[TargetRun], list[TargetReport]]:
    """Returns the only run of an ONNX model. Raises UsageError if the options ask for another."""
    kind, _ = parse_device(options.device)
    if kind == "cuda" or options.target not in (None, ONNX):
        raise UsageError(
            f"{model.name} is an ONNX model, which is verified on ONNX Runtime's CPUExecutionProvider",
            hint="Leave out --device and --target.",
        )
    return [TargetRun(None, "cpu", model)], []


def target_runs(reader: PackageReader, options: VerifyOptions) -> tuple[list[TargetRun], list[TargetReport]]:
    """Returns the targets that run here, the best first, and the others.

    Raises:
        UsageError: The device or the target does not exist.
        NoTargetError: No target runs here. The message gives a reason for each.
    """
    refuse_sidecar(reader)
    manifest = reader.manifest
    kind, _ = parse_device(options.device)
    candidates = named(manifest.targets, options.target)
    if not candidates and manifest.program is not None:
        return [TargetRun(None, manifest.program.device if kind == "auto" else options.device)], []
    host = host_for(candidates, options.device)
    found = survey_package(reader, candidates, options.device, host)
    left_out = [TargetReport(name, left_out=reason) for name, reason in found.rejected.items()]
    return [TargetRun(choice.target.name, choice.device) for choice in found.fitting], left_out


def needed_libraries(
    manifest: Manifest, options: VerifyOptions, runs: Sequence[TargetRun], progress: Progress
) -> dict[Path, list[str]] | MissingOperator:
    """Returns the libraries that the artifact needs but does not contain, each with the namespaces it defines.

    An ONNX model needs none: it has functions.
    """
    if manifest.onnx:
        return {}
    brought = {name for library in manifest.libraries for name in operators_of(library)}
    missing = [operator.name for operator in manifest.operators if operator.name not in brought]
    if not missing:
        return {}
    devices = {run.device.partition(":")[0] for run in runs}
    described = describe_libraries(options.eager.op_libraries, missing, devices, progress)
    for name in missing:
        if not any(name in operators_of(library) for _, library in described):
            advice = "name one with --op-library, or add it with `exportkit package`"
            return MissingOperator(name, f"no library in the artifact has it; {advice}")
    return {
        path: sorted({operator.name.partition("::")[0] for operator in library.defines}) for path, library in described
    }
