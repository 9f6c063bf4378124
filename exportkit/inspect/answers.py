"""Runs two packages on their recorded cases and compares the answers. Each runs in its process."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from exportkit.errors import ExportkitError, MissingLibraryError, NoTargetError, UsageError
from exportkit.onnx.files import named_model
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.trust import demand
from exportkit.progress import Progress, silent
from exportkit.sizes import case_label
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import MissingOperator, Verdict
from exportkit.verify.replay import ReplayProcess
from exportkit.verify.replayer import ReplayEndedError, Replayer, ReplayTask
from exportkit.verify.run_plan import needed_libraries, target_runs


@dataclass(frozen=True)
class AnswerCheck:
    """The answers of both packages to one recorded case.

    Attributes:
        case: The package that recorded the case, and its number and sizes.
        same: Whether each answer is right by the rule of `verify`, where the other one is expected.
        message: How they differ, or how A or B failed.
    """

    case: str
    same: bool
    message: str


@dataclass(frozen=True)
class AnswerComparison:
    """The answers to all recorded cases.

    Attributes:
        a: What ran A: a target and its device.
        b: What ran B.
        checks: One for each case of A, then one for each case of B that A does not have.
    """

    a: str
    b: str
    checks: tuple[AnswerCheck, ...]

    @property
    def same(self) -> bool:
        """Whether all answers are the same."""
        return all(check.same for check in self.checks)


def compare_answers(a: Path, b: Path, device: str, *, progress: Progress = silent) -> AnswerComparison:
    """Calls both packages with the inputs of all recorded cases.

    An answer is right by the rule of FORMAT.md, "Verdicts", where the other package's answer is the expected one, and
    the references and the errors of eager come from the case.

    Args:
        a: A package.
        b: Another one.
        device: The best target for it is run.
        progress: Called with each step before it starts.

    Raises:
        UsageError: One is no package, or neither has a recorded case.
        NoTargetError: One of them has no target that runs here.
        PackageError: A package is bad, lacks a required signature, or lacks an operator.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(None, "exportkit-diff"))
        runners = {name: _Runner.open(path, device, stack, progress) for name, path in (("A", a), ("B", b))}
        checks: list[AnswerCheck] = []
        recorded: set[str] = set()
        for name, runner in runners.items():
            for number, case in enumerate(runner.reader.manifest.cases):
                sha256 = runner.reader.record(case.record).sha256
                if sha256 not in recorded:
                    recorded.add(sha256)
                    task = ReplayTask(f"case {number} of {name} ({case_label(case)})", case, folder / sha256)
                    checks.append(_check(task, runner.reader, runners, folder, progress))
        if not checks:
            raise UsageError(
                "neither of both has a recorded case, so that there is nothing to run",
                hint="Export with --cases N, or leave out --run.",
            )
        return AnswerComparison(runners["A"].name, runners["B"].name, tuple(checks))


@dataclass(frozen=True)
class _Runner:
    """A package, and the process that runs it."""

    reader: PackageReader
    name: str
    process: ReplayProcess

    @classmethod
    def open(cls, path: Path, device: str, stack: ExitStack, progress: Progress) -> _Runner:
        if named_model(path) is not None:
            raise UsageError(f"{path.name} is an ONNX model, and only packages are run", hint="Leave out --run.")
        options = VerifyOptions(device=device)
        reader = stack.enter_context(PackageReader(path, demand=demand()))
        reader.verify()
        runs, left_out = target_runs(reader, options)
        if not runs:
            reasons = "; ".join(f"{target.name}: {target.left_out}" for target in left_out)
            raise NoTargetError(f"no target of {path.name} runs here: {reasons}")
        libraries = needed_libraries(reader.manifest, options, runs[:1], progress)
        if isinstance(libraries, MissingOperator):
            raise MissingLibraryError(f"{path.name}: {libraries.message}")
        process = ReplayProcess.of_target(
            path, reader.manifest, options, target=runs[0].target, device=runs[0].device, libraries=libraries
        )
        return cls(reader, f"{runs[0].name} on {runs[0].device}", stack.enter_context(process))


def _check(
    task: ReplayTask, recording: PackageReader, runners: dict[str, _Runner], folder: Path, progress: Progress
) -> AnswerCheck:
    recording.extract(task.case.record, task.file)
    played: list[Replayer] = []
    for name, runner in runners.items():
        progress(f"running {task.label} on {name}")
        doing, manifest = f"running {task.label}", runner.reader.manifest
        try:
            with Replayer(task, runner.process, manifest, folder, doing=doing) as replayer:
                played.append(replayer.run().read_state())
        except ReplayEndedError as ended:
            return AnswerCheck(task.label, False, f"{name}: {ended.verdict.message}")
        except UsageError as error:  # the case calls methods that this package does not have
            return AnswerCheck(task.label, False, f"{name}: {error.message}")
    verdicts = {"B": _judge(recording, task, *played), "A": _judge(recording, task, *played[::-1])}
    wrong = [f"{name}: {verdict.message}" for name, verdict in verdicts.items() if verdict.exit_code]
    return AnswerCheck(task.label, not wrong, "; ".join(wrong) or verdicts["B"].message)


def _judge(recording: PackageReader, task: ReplayTask, expected: Replayer, actual: Replayer) -> Verdict:
    """Judges one answer where the other one's is expected, with the references of the case."""
    from safetensors.torch import load_file

    from exportkit.runtime.loaded_cases import read_case
    from exportkit.verify.judging import Judge

    try:
        read_case(recording, task.case)  # checks its tensors
        recorded = load_file(task.file)
        wanted = recorded | {key: tensor for key, tensor in expected.tensors.items() if key in recorded}
        return Judge(recording.manifest, VerifyOptions()).verdict(task, wanted, actual.tensors, actual.structures)
    except ExportkitError as error:
        raise type(error)(f"{task.label}: {error.message}", hint=error.hint) from error
