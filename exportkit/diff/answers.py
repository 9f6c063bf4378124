"""Runs two artifacts on their recorded cases and compares the answers. Each runs in its process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exportkit.errors import ExportkitError, MissingLibraryError, NoTargetError, UsageError
from exportkit.onnx.files import named_model, open_onnx
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.trust import demand
from exportkit.progress import Progress, silent
from exportkit.sizes import case_label
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import CallFailed, Match, MissingOperator, Verdict
from exportkit.verify.replay import ReplayProcess
from exportkit.verify.replayer import ReplayEndedError, Replayer, ReplayTask
from exportkit.verify.run_plan import needed_libraries, onnx_run, target_runs


@dataclass(frozen=True)
class AnswerCheck:
    """The answers of both artifacts to one recorded case.

    Attributes:
        case: The artifact that recorded the case, and its number and sizes.
        b: B's answer, held to the case where A's is expected; or how A or B failed.
        a: A's answer, held to the case where B's is expected; None if one of both failed.
        failed: The artifact that failed: "A" or "B"; None if both answered.
    """

    case: str
    b: Verdict
    a: Verdict | None = None
    failed: str | None = None

    @property
    def same(self) -> bool:
        """Whether both answers are right by the rule of `verify`."""
        return isinstance(self.a, Match) and isinstance(self.b, Match)

    @property
    def message(self) -> str:
        """What both answers are, in a line or more."""
        if self.failed is not None:
            return f"{self.failed}: {self.b.message}"
        verdicts = [("B", self.b), *([("A", self.a)] if self.a is not None else [])]
        wrong = [f"{side}: {verdict.message}" for side, verdict in verdicts if verdict.exit_code]
        return "; ".join(wrong) or self.b.message


@dataclass(frozen=True)
class AnswerComparison:
    """The answers to all recorded cases.

    Attributes:
        a: What ran A: a target and its device.
        b: What ran B.
        checks: One for each case of A, then one for each case of B that A does not have.
        notes: What was not run, and why.
    """

    a: str
    b: str
    checks: tuple[AnswerCheck, ...]
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether at least one case was run, and all answers are the same."""
        return bool(self.checks) and all(check.same for check in self.checks)

    def document(self) -> dict[str, Any]:
        """Returns all of it as JSON."""
        checks = [
            {"case": check.case, "same": check.same, "message": check.message, "failed": check.failed}
            | {side: verdict and {"kind": verdict.kind, **dataclasses.asdict(verdict)} for side, verdict in pair}
            for check in self.checks
            for pair in [(("a", check.a), ("b", check.b))]
        ]
        return {"same": self.same, "a": self.a, "b": self.b, "checks": checks, "notes": list(self.notes)}


def compare_answers(a: Path, b: Path, options: VerifyOptions, *, progress: Progress = silent) -> AnswerComparison:
    """Calls both artifacts with the inputs of all recorded cases.

    An answer is right by the rule of FORMAT.md, "Verdicts", where the other artifact's answer is the expected one, and
    the references and the errors of eager come from the case.

    Args:
        a: An artifact or a package, or an ONNX model.
        b: Another one.
        options: `device`, `op_libraries`, `timeout` and `seed` are used.
        progress: Called with each step before it starts.

    Raises:
        UsageError: Neither has a recorded case.
        NoTargetError: One of them has no target that runs here.
        PackageError: An artifact is bad, lacks a required signature, or lacks an operator.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(None, "exportkit-diff"))
        one, other = (_Runner.open(path, options, stack, progress) for path in (a, b))
        if not (one.reader.manifest.cases or other.reader.manifest.cases):
            raise UsageError(
                "neither of both has a recorded case, so that there is nothing to run",
                hint="Export with --cases N, or leave out --run.",
            )
        checks: list[AnswerCheck] = []
        recorded: set[str] = set()
        for name, side in (("A", one), ("B", other)):
            checks += _checks(name, side.reader, one, other, folder, recorded, progress)
        return AnswerComparison(one.name, other.name, tuple(checks))


@dataclass(frozen=True)
class _Runner:
    """An artifact, and the process that runs it."""

    reader: PackageReader
    name: str
    process: ReplayProcess

    @classmethod
    def open(cls, path: Path, options: VerifyOptions, stack: ExitStack, progress: Progress) -> _Runner:
        model, asked = named_model(path), demand()
        reader = stack.enter_context(
            PackageReader(path, demand=asked) if model is None else open_onnx(model, demand=asked)
        )
        reader.verify()
        runs, left_out = onnx_run(model, options) if model is not None else target_runs(reader, options)
        if not runs:
            reasons = "; ".join(f"{target.name}: {target.left_out}" for target in left_out)
            raise NoTargetError(f"no target of {path.name} runs here: {reasons}")
        libraries = needed_libraries(reader.manifest, options, runs[:1], progress)
        if isinstance(libraries, MissingOperator):
            raise MissingLibraryError(f"{path.name}: {libraries.message}")
        if model is not None:
            process = ReplayProcess.of_onnx(model, reader, options)
        else:
            run = runs[0]
            process = ReplayProcess.of_target(
                path, reader.manifest, options, target=run.target, device=run.device, libraries=libraries
            )
        return cls(reader, f"{runs[0].name} on {runs[0].device}", stack.enter_context(process))


def _checks(
    owner: str,
    recording: PackageReader,
    a: _Runner,
    b: _Runner,
    folder: Path,
    recorded: set[str],
    progress: Progress,
) -> Iterator[AnswerCheck]:
    """Compares the answers to the cases of one artifact, but for those that were met before."""
    for number, case in enumerate(recording.manifest.cases):
        sha256 = recording.record(case.record).sha256
        if sha256 in recorded:
            continue
        recorded.add(sha256)
        label = f"case {number} of {owner} ({case_label(case)})"
        task = ReplayTask(label, case, folder / "case.safetensors")
        recording.extract(case.record, task.file)
        played: list[Replayer] = []
        for name, side in (("A", a), ("B", b)):
            progress(f"running {label} on {name}")
            try:
                with Replayer(task, side.process, side.reader.manifest, folder, doing=f"running {label}") as replayer:
                    played.append(replayer.run().read_state())
            except ReplayEndedError as ended:
                yield AnswerCheck(label, ended.verdict, failed=name)
                break
            except UsageError as error:  # the other artifact's calls are of methods that this one does not have
                yield AnswerCheck(label, CallFailed(type(error).__name__, error.message), failed=name)
                break
        else:
            try:
                here, there = (_judge(recording, task, *pair) for pair in (played, played[::-1]))
            except ExportkitError as error:
                raise type(error)(f"{label}: {error.message}", hint=error.hint) from error
            yield AnswerCheck(label, here, there)
        task.file.unlink()


def _judge(recording: PackageReader, task: ReplayTask, expected: Replayer, actual: Replayer) -> Verdict:
    """Judges one answer where the other one's is expected, with the references of the case."""
    from safetensors.torch import load_file

    from exportkit.runtime.case_tensors import read_case
    from exportkit.verify.judging import Judge

    read_case(recording, task.case)  # checks its tensors
    recorded = load_file(task.file)
    wanted = recorded | {key: tensor for key, tensor in expected.tensors.items() if key in recorded}
    return Judge(recording.manifest, VerifyOptions()).verdict(task, wanted, actual.tensors, actual.structures)
