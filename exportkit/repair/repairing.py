"""Exports a model, verifies it, and looks for options that make it right where it is not."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, TypeVar

import msgspec

from exportkit.child.messages import Failed, Message
from exportkit.errors import ExportError, ExportkitError, HostError
from exportkit.export.models.find_libraries import named_libraries
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import check_writable, temporary_folder, write_whole
from exportkit.package.compiled_with import GivenOptions
from exportkit.package.manifest import Manifest, PackagedMethod
from exportkit.progress import Progress, silent
from exportkit.reference_model import ReferenceModel
from exportkit.repair.attempts import Attempt, Costs, Repaired, tried_lines
from exportkit.repair.remedies import Patient, Remedy, left_to_eager, remedies
from exportkit.repair.repair_commands import (
    CallsTimed,
    CompileModel,
    ModelCompiled,
    ModelTraced,
    NotCompiled,
    TimeCalls,
    TraceModel,
)
from exportkit.verify.bisecting import searching
from exportkit.verify.graph_bisection import BisectedCall, BisectedGraph, GraphBisection
from exportkit.verify.located import Located
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import (
    CallFailed,
    Crashed,
    LoadFailed,
    Mismatch,
    TimedOut,
    WrongDtype,
    WrongShape,
    WrongStructure,
)
from exportkit.verify.report import Report
from exportkit.verify.verify import verify
from exportkit.verify.verify_worker import VerifyWorker

DEFAULT_MINUTES = 20.0
_EXTENSIONS = 3  # how often more operators are left to eager

# What other options of the compiler may change.
_CODES_FAULT = (Mismatch, WrongDtype, WrongShape, WrongStructure, CallFailed, Crashed, TimedOut, LoadFailed)

M = TypeVar("M", bound=Message)


class _Outcome(Protocol):
    """What came of a candidate: one line, and whether the code is right."""

    @property
    def text(self) -> str: ...

    @property
    def right(self) -> bool: ...


Result = TypeVar("Result", bound=_Outcome)


@dataclass(frozen=True)
class _Tested:
    text: str
    right: bool


@dataclass(frozen=True)
class _Problem:
    """A model's report, or why the model does not compile."""

    report: Report | None = None
    refused: NotCompiled | None = None

    @property
    def text(self) -> str:
        """How it fails, or that it does not."""
        if self.refused is not None:
            return _not_compiled(self.refused.message)
        failure = self.report.failure if self.report else None
        return "right" if failure is None else f"differs: {_line(failure.verdict.message)}"

    @property
    def right(self) -> bool:
        """Whether it compiles and passes."""
        return self.refused is None and self.report is not None and self.report.exit_code == 0


def export_repaired(
    task: TraceModel, out: Path, *, minutes: float = DEFAULT_MINUTES, progress: Progress = silent
) -> Repaired:
    """Exports a model in a child process and verifies it. If it is wrong or does not compile, tries options.

    Each candidate is compiled in a process without a network: first the smallest part of the graph that goes wrong,
    if a bisection found one, then the model. What is right is timed beside the code that is not, and beside eager.

    Args:
        task: The model, and how it is traced and compiled.
        out: The file to write. It is replaced only if the code is right.
        minutes: When no further candidate is tried.
        progress: Called with each step before it starts.

    Raises:
        ExportError: No candidate makes the code right. `<name>.repair.txt` beside `out` says what was tried.
        ExportkitError: Tracing failed, as for `export_aoti`.
    """
    check_writable(out)
    with temporary_folder(out.parent, f".{out.name[:200]}") as folder, _Repair(task, out, folder, progress) as repair:
        return repair.run(time.monotonic() + 60 * minutes, minutes)


class _Repair:
    def __init__(self, task: TraceModel, out: Path, folder: Path, progress: Progress) -> None:
        self._task, self._out, self._folder, self._progress = task, out, folder, progress
        self._worker = VerifyWorker("exportkit.repair.repair_worker", search_path="caller")
        self._traced: ModelTraced
        self._manifest: Manifest
        self._attempts: list[Attempt] = []
        self._made = 0
        self._deadline = 0.0
        self._problem_text = ""
        saved = task.model.endswith(".pt2")
        weights = Path(task.weights) if task.weights else None
        libraries = [Path(each) if each.startswith("/") else each for each in task.op_libraries]
        eager = ReferenceModel(None if saved else task.model, weights, libraries)
        self._options = VerifyOptions(against="cases" if saved else "both", eager=eager, seed=task.seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._worker.close()

    def run(self, deadline: float, minutes: float) -> Repaired:
        self._deadline = deadline
        self._progress(f"tracing {self._task.model} in a process of its own")
        self._traced = self._ask(self._task, ModelTraced, "tracing the model")
        self._manifest = msgspec.json.decode(self._traced.manifest, type=Manifest)
        self._find_libraries()
        first = self._path()
        self._progress("compiling the model")
        problem = self._whole(GivenOptions(), first)
        if problem.right:
            return Repaired(self._keep(first))
        self._problem_text = f"the compiled code {problem.text}" if problem.report else f"the model {problem.text}"
        found = self._look(problem, GivenOptions())
        if found is None:
            raise self._refusal(time.monotonic() >= deadline, minutes)
        given, path = found
        costs = self._time(path, first if problem.report else None)
        return Repaired(self._keep(path), given, self._problem_text, tuple(self._attempts), costs)

    def _find_libraries(self) -> None:
        """Finds the libraries that the artifact calls, as `exportkit package` does."""
        eager, operators = self._options.eager, {each.name for each in self._manifest.operators}
        libraries = named_libraries(eager, operators, self._progress)
        self._options = replace(self._options, eager=replace(eager, op_libraries=libraries))

    def _look(self, problem: _Problem, base: GivenOptions, depth: int = 0) -> tuple[GivenOptions, Path] | None:
        """Returns options with which the model is right, and its artifact."""
        with ExitStack() as stack:
            part = self._locate(problem, base, stack)
            for remedy in remedies(self._patient(problem, part)):
                if time.monotonic() >= self._deadline:
                    break
                given = base.with_more(remedy.given)
                smaller = part is not None and not part.is_whole
                if part and smaller and not self._try(remedy.what, given, part.nodes, part.outcome).right:
                    continue
                given, path, outcome = self._try_whole(remedy, given, part, problem)
                if outcome.right:
                    return given, path
                if outcome.report is not None and problem.refused is not None and depth == 0:
                    return self._look(outcome, given, depth + 1)  # it compiles now, and is wrong
            return None

    def _try_whole(
        self, remedy: Remedy, given: GivenOptions, part: _Part | None, problem: _Problem
    ) -> tuple[GivenOptions, Path, _Problem]:
        """Compiles the model with a remedy. Where that helps some results, the operators of the others go to eager."""
        what, before = remedy.what, problem.report
        for extension in itertools.count():
            path = self._path()
            outcome = self._try(what, given, "the model", functools.partial(self._whole, path=path))
            helped = part is not None and (
                remedy.local or part.wrong_results(outcome.report) < part.wrong_results(before)
            )
            wrong = part.wrong_operators(outcome.report) if part and helped else ()
            more = tuple(name for name in wrong if name.startswith("aten.") and name not in given.eager_kernels)
            if outcome.right or not more or extension == _EXTENSIONS or time.monotonic() >= self._deadline:
                break
            given = given.with_more(GivenOptions({}, more))
            what = left_to_eager(given.eager_kernels)
            if given.inductor_config:
                what = f"{remedy.what}, and {what}"
        return given, path, outcome

    def _try(self, what: str, given: GivenOptions, on: str, test: Callable[[GivenOptions], Result]) -> Result:
        left = max(0, round((self._deadline - time.monotonic()) / 60))
        self._progress(f"trying on {on}: {what}; {left} minutes are left")
        begin = time.monotonic()
        outcome = test(given)
        took = time.monotonic() - begin
        self._attempts.append(Attempt(what, given.arguments, on, outcome.text, outcome.right, took))
        return outcome

    def _patient(self, problem: _Problem, part: _Part | None) -> Patient:
        operators: Sequence[str] = ()
        if problem.refused is not None and problem.refused.operator is not None:
            operators = (problem.refused.operator,)
        elif part is not None:
            operators = tuple(dict.fromkeys((part.operator, *part.independent(problem.report))))
        traced = self._traced
        return Patient(traced.device, traced.halves, traced.known, self._task.compiling.inductor_config, operators)

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def _locate(self, problem: _Problem, base: GivenOptions, stack: ExitStack) -> _Part | None:
        """Finds the smallest part of the graph that goes wrong; None if that cannot be found."""
        if problem.refused is not None and problem.refused.operator is not None:
            place = f", {problem.refused.where}" if problem.refused.where else ""
            self._problem_text += f"\nat {problem.refused.operator}{place}"
            return None
        try:
            if problem.report is not None:
                artifact = Path(problem.report.artifact)
                search = stack.enter_context(
                    searching(artifact, problem.report, self._options, ours=True, progress=self._progress)
                )
                located = search.locate()
            else:
                for method in self._manifest.methods:
                    search = stack.enter_context(self._compile_search(method, base))
                    located = search.locate(fails=functools.partial(_refused, search))
                    if located.point is not None:
                        break
        except ExportkitError as error:
            self._problem_text += f"\n{error.message}"
            return None
        if located.point is None:
            if problem.report is not None:
                self._problem_text += f"\n{located.message}"
            return None
        self._problem_text += f"\n{located.place}"
        return _Part(search, located, compiles=problem.refused is not None)

    def _compile_search(self, method: PackagedMethod, base: GivenOptions) -> GraphBisection:
        """Returns a search over the graph of a method, for a model that does not compile."""
        sizes = {dimension.name: dimension.min for each in self._manifest.methods for dimension in each.call.dimensions}
        own = {dimension.name: dimension.min for dimension in method.call.dimensions}
        subject = BisectedGraph(
            manifest=self._manifest,
            label="compiling",
            call=BisectedCall(method, 0, sizes if method.state else own, None, 0, session_sizes=sizes),
            target="the compiler",
            device=self._traced.device,
            cpu_isa=self._traced.cpu_isa,
            embed_weights=self._task.compiling.embed_weights,
            given=GivenOptions(self._task.compiling.inductor_config).with_more(base),
        )
        return GraphBisection(subject, self._options, self._folder, self._progress)

    # --- compiling and verifying -------------------------------------------------------------------------------------

    def _path(self) -> Path:
        self._made += 1
        return self._folder / f"{self._made}.pt2"

    def _whole(self, given: GivenOptions, path: Path) -> _Problem:
        """Compiles the model, and verifies what came of it."""
        command = CompileModel(dict(given.inductor_config), given.eager_kernels, str(path))
        answer = self._answer(command, ModelCompiled | NotCompiled, "compiling")  # type: ignore[arg-type]
        if isinstance(answer, NotCompiled):
            return _Problem(refused=answer)
        if not isinstance(answer, ModelCompiled):
            message = answer.detail if isinstance(answer, Failed) else answer.message
            if isinstance(answer, (Crashed, TimedOut)):  # the compiler took the process with it
                self._worker.close()
                self._worker = VerifyWorker("exportkit.repair.repair_worker", search_path="caller")
                self._ask(self._task, ModelTraced, "tracing the model again")
            return _Problem(refused=NotCompiled(message, None, ""))
        with PackageReader(path) as reader:
            digest = reader.manifest_sha256
        report = verify(path, self._options, unsigned=digest, progress=self._progress)
        if report.failure is not None and not isinstance(report.failure.verdict, _CODES_FAULT):
            raise ExportError(
                f"the compiled code cannot be verified: {report.failure.verdict.message}",
                hint="Without --repair, nothing is verified here.",
            )
        return _Problem(report=report)

    def _time(self, repaired: Path, unrepaired: Path | None) -> Costs | None:
        self._progress("timing the code beside eager")
        paths = [repaired, *([unrepaired] if unrepaired else [])]
        answer = self._answer(TimeCalls(tuple(map(str, paths))), CallsTimed, "timing the code")
        if not isinstance(answer, CallsTimed):
            return None
        return Costs(answer.artifacts[0], answer.artifacts[1] if unrepaired else None, answer.eager)

    def _answer(self, command: Message, kind: type[M], doing: str) -> M | Failed | Crashed | TimedOut:
        left = max(60.0, self._deadline - time.monotonic() + 600)
        return self._worker.ask(command, kind, doing=doing, timeout=left)

    def _ask(self, command: Message, kind: type[M], doing: str) -> M:
        answer = self._answer(command, kind, doing)
        if isinstance(answer, Failed):
            raise answer.exception()
        if isinstance(answer, (Crashed, TimedOut)):
            raise HostError(answer.message)
        return answer

    def _keep(self, path: Path) -> Manifest:
        with PackageReader(path) as reader:
            manifest = reader.manifest
        os.replace(path, self._out)
        return manifest

    def _refusal(self, late: bool, minutes: float) -> ExportError:
        report = self._out.with_name(f"{self._out.name}.repair.txt")
        lines = [self._problem_text, *tried_lines(self._attempts)]
        if late:
            lines.append(f"the time is up: {minutes:g} minutes")
        write_whole(report, "\n".join(lines).encode() + b"\n")
        return ExportError(
            "\n".join(["nothing that was tried makes the compiled code right", *lines]),
            hint=f"{report} has this report. `--format program` writes the program, which is not compiled.",
        )


class _Part:
    """The smallest part of the graph that goes wrong, and how it does."""

    def __init__(self, search: GraphBisection, located: Located, *, compiles: bool) -> None:
        assert located.point is not None
        assert located.search.fails is not None
        self._search, self._cut, self._point, self._compiles = search, located.search.fails, located.point, compiles
        self._count = len(located.points)
        self.operator = located.point.operator

    @property
    def nodes(self) -> str:
        """How much of the graph it is."""
        return f"{self._cut + 1} node{'s' if self._cut else ''}"

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole graph, so that nothing is gained by trying it first."""
        return self._cut + 1 == self._count

    def outcome(self, given: GivenOptions) -> _Tested:
        """Compiles it with options: what came of it."""
        if self._compiles:
            refused = self._search.refused(self._cut, given)
            return _Tested("compiles", True) if refused is None else _Tested(_not_compiled(refused), False)
        failed = self._search.fails(self._cut, given)
        if failed is None:
            return _Tested(_not_compiled(self._search.why_untested(self._cut)), False)
        return _Tested("still differs", False) if failed else _Tested("right", True)

    def independent(self, report: Report | None) -> list[str]:
        """Returns the operators of the results that are wrong and do not depend on the part."""
        return self.wrong_operators(report, without=self._point.reaches)

    def wrong_operators(self, report: Report | None, *, without: Sequence[int] = ()) -> list[str]:
        """Returns the operators that compute the results that are wrong."""
        results, numbers = self._search.results, sorted(self.wrong_results(report) - set(without))
        return list(dict.fromkeys(results[number] for number in numbers if number < len(results)))

    def wrong_results(self, report: Report | None) -> set[int]:
        """Returns the numbers of the results that are wrong in a verification."""
        names = [output.name for output in self._search.method.call.outputs]
        verdicts = [check.verdict for check in report.checks if check.failed] if report else []
        wrong = {verdict.output for verdict in verdicts if isinstance(verdict, (WrongDtype, WrongShape))}
        outputs = [output for verdict in verdicts if isinstance(verdict, Mismatch) for output in verdict.outputs]
        wrong |= {output.name for output in outputs if not output.agrees}
        return {number for number, name in enumerate(names) if name in wrong}


def _refused(search: GraphBisection, cut: int) -> bool:
    return search.refused(cut) is not None


def _not_compiled(message: str) -> str:
    return f"does not compile: {_line(message)}"


def _line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "(no message)"
