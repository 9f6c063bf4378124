"""Verifies an artifact in fresh processes, against its recorded cases and the eager model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from exportkit.errors import (
    ExportkitError,
    PolicyError,
    RevokedError,
    SignatureError,
    SignatureMissingError,
    UsageError,
)
from exportkit.onnx.files import named_model, open_onnx
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.manifest import Manifest
from exportkit.progress import Progress, silent
from exportkit.reference_model import unnamed
from exportkit.verify.calls import TargetCalls
from exportkit.verify.commands import ArtifactLoaded
from exportkit.verify.cpp_replay import CppReplay, replay_in_cpp
from exportkit.verify.eager import EagerProcess
from exportkit.verify.eager_plan import EagerPlan, plan_eager
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import LoadFailed, MissingOperator, Signed
from exportkit.verify.replay import ReplayProcess
from exportkit.verify.replayer import ReplayedTarget
from exportkit.verify.report import Check, Report, TargetReport
from exportkit.verify.run_plan import TargetRun, needed_libraries, onnx_run, target_runs


def verify(
    artifact: Path,
    options: VerifyOptions | None = None,
    *,
    unsigned: str | None = None,
    progress: Progress = silent,
) -> Report:
    """Runs every target of an artifact that this machine can run, and compares the outputs.

    Required signatures are checked first. An untrusted artifact is not read further. A trusted one runs only what was
    signed. Eager is compared only if the options name MODEL, or an installed package has registered the artifact's.

    A case is a sequence of calls, made in a session of its own. Sessions are then compared with one another: two in
    turns, a fork, a reset, and a saved state.

    Each target runs in a fresh process that imports torch and the runtime. That process cannot import the exporter, the
    operators' Python or the model's source. The eager model runs in another process. Every outcome of these processes
    is a verdict, even a crash.

    Args:
        artifact: A `.pt2` that exportkit wrote, or an ONNX model with its sidecar beside it.
        options: The options; see VerifyOptions.
        unsigned: The sha256 of a manifest that needs no signature, because the caller made the artifact and verifies it
            before signing.
        progress: Called with each step before it starts.

    Raises:
        UsageError: The options contradict the artifact: it has no recorded cases or no such target, or MODEL must be
            named.
    """
    options = options or VerifyOptions()
    progress(f"checking {artifact.name}")
    try:
        by, required = options.trust.demanded_by(), None if unsigned else options.trust.demand()
        model = named_model(artifact)
        opened = PackageReader(artifact, demand=required) if model is None else open_onnx(model, demand=required)
        with opened as reader, temporary_folder(None, "exportkit-verify") as folder:
            keys = tuple(key.id for key in reader.signers)
            signed = [Check("package", "signature", {}, Signed(keys))] if keys else []
            reader.verify()
            _check_comparable(artifact, reader.manifest, options, by)
            _check_runner(artifact, reader.manifest, options)
            runs, left_out = onnx_run(model, options) if model is not None else target_runs(reader, options)
            libraries = needed_libraries(reader.manifest, options, runs, progress)
            if isinstance(libraries, MissingOperator):
                missing = Check("package", "operators", {}, libraries)
                left_out += [TargetReport(run.name, left_out="an operator is missing") for run in runs]
                checks = (*signed, missing)
                return Report(str(artifact), None, tuple(left_out), checks, manifest_sha256=reader.manifest_sha256)
            verification = _Verification(
                artifact, reader, options, folder, libraries, progress, unsigned=unsigned, demanded_by=by, checks=signed
            )
            return verification.report(runs, left_out)
    except UsageError:
        raise
    except ExportkitError as error:
        failed = LoadFailed.of(error)
        of_trust = (SignatureMissingError, SignatureError, RevokedError, PolicyError)
        label = "signature" if isinstance(error, of_trust) else "load"
        return Report(str(artifact), None, (), (Check("package", label, {}, failed),))


def _check_comparable(artifact: Path, manifest: Manifest, options: VerifyOptions, by: str | None) -> None:
    """Raises UsageError if the artifact lacks what the options compare with."""
    if options.against == "cases" and not manifest.cases:
        raise UsageError(
            f"{artifact.name} has no recorded cases", hint="Export with --cases N, or use --against eager."
        )
    count = len(manifest.cases)
    if missing := [number for number in options.cases if number >= count]:
        raise UsageError(f"{artifact.name} has no case {missing[0]}", hint=f"Its cases are 0 to {count - 1}.")
    recorded = manifest.source.model
    if options.against == "eager" and options.eager.model_of(recorded, by) is None:
        raise UsageError(
            f"not compared with eager: {unnamed(recorded, by)}",
            hint="The named source is imported, so name only a source that you trust.",
        )


def _check_runner(artifact: Path, manifest: Manifest, options: VerifyOptions) -> None:
    """Raises UsageError if the options ask exportkit-run for what it does not do."""
    if options.runner == "python":
        return
    if not manifest.targets or not manifest.cases:
        missing = "compiled target" if not manifest.targets else "recorded case"
        raise UsageError(f"{artifact.name} has no {missing}, which --runner cpp replays", hint="Use --runner python.")
    if options.against == "eager" or options.rtol is not None or options.eager.op_libraries:
        raise UsageError(
            "--runner cpp replays the recorded cases, with the package's own libraries and tolerances",
            hint="Leave out --against eager, --rtol, --atol and --op-library, or use --runner python.",
        )


@dataclass
class _Verification:
    artifact: Path
    reader: PackageReader
    options: VerifyOptions
    folder: Path
    libraries: Mapping[Path, Sequence[str]]
    progress: Progress
    unsigned: str | None
    demanded_by: str | None
    checks: list[Check]
    version: str | None = None

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    def report(self, runs: Iterable[TargetRun], left_out: Iterable[TargetReport]) -> Report:
        """Runs all targets. Targets on the same device share one eager model."""
        options = self.options
        compared = options.against != "cases" and options.runner == "python"
        plans = plan_eager(self.manifest, options) if compared else ()
        # Without cases, a verification that skips eager would compare nothing.
        required = options.against == "eager" or not self.manifest.cases
        reports = []
        for device, same in groupby(runs, key=lambda run: run.device):
            eager_process = EagerProcess(
                self.manifest,
                options,
                device=device,
                required=required,
                demanded_by=self.demanded_by,
            )
            with eager_process as eager:
                reports += [self._run(run, eager, plans) for run in same]
        by_torch, by_onnx = (None, self.version) if self.manifest.onnx else (self.version, None)
        targets = (*reports, *left_out)
        digest = self.reader.manifest_sha256
        skipped = tuple(plan.labelled(text) for plan in plans for text in plan.sizes.skipped)
        return Report(str(self.artifact), by_torch, targets, tuple(self.checks), skipped, by_onnx, digest)

    def _process(self, run: TargetRun) -> ReplayProcess:
        if run.onnx_model is not None:
            return ReplayProcess.of_onnx(run.onnx_model, self.reader, self.options)
        return ReplayProcess.of_target(
            self.artifact,
            self.manifest,
            self.options,
            target=run.target,
            device=run.device,
            libraries=self.libraries,
            unsigned=self.unsigned,
        )

    def _run(self, run: TargetRun, eager: EagerProcess, plans: Sequence[EagerPlan]) -> TargetReport:
        if self.options.runner == "cpp":
            return self._run_in_cpp(run)
        self.progress(f"loading {run.name} in a fresh process")
        with self._process(run) as replay:
            replay.start()
            if any(plan.sizes.sizes for plan in plans):
                eager.begin()
            import exportkit.verify.judging  # noqa: F401  (torch, which takes seconds, while the processes start)

            loaded = replay.load()
            if not isinstance(loaded, ArtifactLoaded):
                self.checks.append(Check("package", "load", {}, loaded, target=run.name))
                return TargetReport(run.name, run.device)
            self.version = loaded.version
            target = ReplayedTarget(run.name, replay, self.manifest, self.options, self.folder, self.progress)
            calls = TargetCalls(target, self.reader, run.target is not None)
            if self.options.against != "eager":
                self.checks += calls.with_cases()
                if run.target is not None and not self.options.cases:
                    self.checks += calls.with_sessions()
                if not self.options.cases:
                    self.checks += calls.with_gradients()
            if self.options.against != "cases":
                self.checks += calls.with_eager(eager, plans)
        return TargetReport(run.name, loaded.device, loaded.seconds)

    def _run_in_cpp(self, run: TargetRun) -> TargetReport:
        assert run.target is not None
        self.progress(f"replaying the cases of {run.name} in C++")
        found = replay_in_cpp(self.artifact, self.reader, self.options, target=run.target, device=run.device)
        if not isinstance(found, CppReplay):
            self.checks.append(Check("package", "load", {}, found, target=run.name))
            return TargetReport(run.name, run.device)
        self.version = found.version
        self.checks += found.checks
        return TargetReport(run.name, found.device, found.seconds)
