"""Verifies an artifact: in a process that has nothing else, against its recorded cases and against the eager model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.errors import ExportkitError, PolicyError, SignatureError, SignatureMissingError, UsageError
from exportkit.libraries import built_in_libraries
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.libraries import describe_library
from exportkit.package.manifest import Manifest, Node
from exportkit.package.sizes import label_of, plan_sizes
from exportkit.package.trust import check_trust
from exportkit.verify.eager import EagerProcess
from exportkit.verify.messages import Called, Drawn, Loaded
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import (
    Check,
    EagerUnavailable,
    LoadFailed,
    MissingOperator,
    Report,
    Signed,
    Verdict,
    WrongStructure,
)
from exportkit.verify.replay import ReplayProcess


def verify(
    artifact: Path, options: VerifyOptions | None = None, *, progress: Callable[[str], None] = lambda step: None
) -> Report:
    """Runs an artifact in a fresh process, and compares what it returns.

    Signatures come first, where somebody asks for them: an artifact that is not trusted is not looked into any further.

    That process imports torch and the runtime; the exporter, the operators' Python and the model's source are refused
    to it. The eager model runs in a process of its own. Whatever either does, a crash included, is a verdict.

    Args:
        artifact: A `.pt2` that exportkit wrote.
        options: See VerifyOptions.
        progress: Told what is about to be done.

    Raises:
        UsageError: The options contradict the artifact: cases are asked for, and it has none.
    """
    options = options or VerifyOptions()
    progress(f"checking {artifact.name}")
    try:
        with PackageReader(artifact) as reader, temporary_folder(None, "exportkit-verify") as folder:
            keys = check_trust(reader, options.public_keys or None, options.signature)
            signed = [Check("package", "signature", {}, Signed(tuple(key.id for key in keys)))] if keys else []
            reader.verify()
            if options.against == "cases" and not reader.manifest.cases:
                raise UsageError(
                    f"{artifact.name} has no recorded cases", hint="Export with --cases N, or use --against eager."
                )
            libraries = _needed_libraries(reader.manifest, options)
            if isinstance(libraries, MissingOperator):
                missing = Check("package", "operators", {}, libraries)
                return Report(str(artifact), None, None, None, None, (*signed, missing))
            with ReplayProcess(artifact, reader.manifest, options, folder=folder, libraries=libraries) as replay:
                run = _Verification(artifact, reader, options, folder, replay, progress, checks=signed)
                return run.report()
    except UsageError:
        raise
    except ExportkitError as error:
        failed = LoadFailed(type(error).__name__, str(error), error.exit_code)
        label = "signature" if isinstance(error, (SignatureMissingError, SignatureError, PolicyError)) else "load"
        return Report(str(artifact), None, None, None, None, (Check("package", label, {}, failed),))


def _needed_libraries(manifest: Manifest, options: VerifyOptions) -> dict[Path, list[str]] | MissingOperator:
    """The libraries that the replay process must load first, because the artifact does not bring them.

    Each with the operator namespaces it defines.
    """
    brought = {operator.name for library in manifest.libraries for operator in library.defines}
    missing = [operator.name for operator in manifest.operators if operator.name not in brought]
    if not missing:
        return {}
    libraries = [Path(library).resolve() for library in options.op_libraries]
    if any(name.startswith("arr_coc::") for name in missing):
        devices = {target.device for target in manifest.targets} if options.device != "cpu" else set()
        libraries += [path for device, path in built_in_libraries().items() if device == "cpu" or device in devices]
    given = {library: [operator.name for operator in describe_library(library).defines] for library in libraries}
    for name in missing:
        if not any(name in names for names in given.values()):
            advice = "name one with --op-library, or `exportkit package` the artifact with it"
            return MissingOperator(name, f"the artifact brings no library that defines it; {advice}")
    return {library: sorted({name.partition("::")[0] for name in names}) for library, names in given.items()}


@dataclass
class _Verification:
    """One run."""

    artifact: Path
    reader: PackageReader
    options: VerifyOptions
    folder: Path
    replay: ReplayProcess
    progress: Callable[[str], None]
    loaded: Loaded | None = None
    checks: list[Check] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    def report(self) -> Report:
        self.progress("loading in a fresh process")
        answer = self.replay.load()
        if not isinstance(answer, Loaded):
            self.checks.append(Check("package", "load", {}, answer))
            return Report(str(self.artifact), None, None, None, None, tuple(self.checks), tuple(self.skipped))
        self.loaded = answer
        if self.options.against != "eager":
            self._check_cases()
        if self.options.against != "cases":
            self._check_eager()
        others = (target.name for target in self.manifest.targets if target.name != answer.target)
        self.skipped += [f"target {name}: another one was run here; --device chooses" for name in others]
        return Report(
            artifact=str(self.artifact),
            target=answer.target,
            device=answer.device,
            torch=answer.torch,
            load_seconds=answer.seconds,
            checks=tuple(self.checks),
            skipped=tuple(self.skipped),
        )

    def _check_cases(self) -> None:
        for index, case in enumerate(self.manifest.cases):
            label = f"case {index} ({label_of(case.sizes)})"
            self.progress(f"running {label}")
            file = self.folder / f"case-{index}.safetensors"
            self.reader.extract(case.record, file)
            self._check("cases", label, case.sizes, inputs=file, expected=file, doing=f"running {label}")
            file.unlink()

    def _check(
        self,
        against: Literal["cases", "eager"],
        label: str,
        sizes: Mapping[str, int],
        *,
        inputs: Path,
        expected: Path,
        doing: str,
    ) -> None:
        """One call of the packaged model."""
        outputs = self.folder / "outputs.safetensors"
        answer = self.replay.call(inputs, outputs, doing=doing)
        if isinstance(answer, Called):
            verdict = self._judge(answer.structure, expected, outputs)
            outputs.unlink()
            self.checks.append(Check(against, label, dict(sizes), verdict, answer.seconds))
        else:
            self.checks.append(Check(against, label, dict(sizes), answer))

    def _judge(self, structure: str, expected: Path, outputs: Path) -> Verdict:
        from safetensors.torch import load_file

        from exportkit.verify.compare import compare_outputs

        call = self.manifest.call
        if (wrong := _compare_structure(call.result, structure)) is not None:
            return wrong
        want, got = load_file(expected), load_file(outputs)
        names = [f"output.{i}" for i in range(len(call.outputs))]
        return compare_outputs(
            call.outputs,
            [want[name] for name in names],
            [got[name] for name in names],
            rtol=self.options.rtol,
            atol=self.options.atol,
        )

    # --- against the eager model --------------------------------------------------------------------------------------

    def _check_eager(self) -> None:
        assert self.loaded is not None
        model = self.options.model or self.manifest.source.model
        plan = plan_sizes(
            self.manifest.call, self.options.shapes, seed=self.options.seed, max_bytes=self.options.max_input_bytes
        )
        self.skipped += plan.skipped
        # Where nothing else was compared, a verification that skips eager would have verified nothing.
        required = self.options.against == "eager" or not self.manifest.cases
        if model is None:
            reason = "the artifact was exported from an object, not from a MODEL that can be imported; name it: --model"
            self._no_eager(EagerUnavailable(reason, required))
            return
        self.progress(f"making the eager model {model}")
        with EagerProcess(self.artifact, self.manifest, model, self.options, folder=self.folder) as eager:
            if (verdict := eager.resolve(self.loaded.device, required=required)) is not None:
                self._no_eager(verdict)
                return
            for number, sizes in enumerate(plan.sizes):
                self._compare_with_eager(eager, number, sizes)
                if not eager.alive:
                    break

    def _no_eager(self, verdict: Verdict) -> None:
        self.checks.append(Check("eager", "the eager model", {}, verdict))

    def _compare_with_eager(self, eager: EagerProcess, number: int, sizes: Mapping[str, int]) -> None:
        label = label_of(sizes)
        self.progress(f"comparing with eager at {label}")
        inputs, expected = self.folder / "eager-inputs.safetensors", self.folder / "eager-outputs.safetensors"
        answer = eager.draw(sizes, label=label, seed=self.options.seed + number, inputs=inputs, outputs=expected)
        if not isinstance(answer, Drawn):
            self.checks.append(Check("eager", label, dict(sizes), answer))
        elif (wrong := _compare_structure(self.manifest.call.result, answer.structure)) is not None:
            self.checks.append(Check("eager", label, dict(sizes), wrong))
        else:
            doing = f"running the packaged model at {label}"
            self._check("eager", label, sizes, inputs=inputs, expected=expected, doing=doing)


def _compare_structure(expected: Node, structure: str) -> WrongStructure | None:
    actual = msgspec.json.decode(structure, type=Node)
    if actual == expected:
        return None
    return WrongStructure(msgspec.json.encode(expected).decode(), structure)
