"""Finds the first node of the graph where compiled code and eager differ.

The graph is cut after one node after the other, by bisection. What a cut leaves is compiled like the whole model, in a
process of its own, and verified like any artifact: against one case, which the same graph in eager mode has recorded,
with float64 references.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec

from exportkit.child.messages import Failed
from exportkit.errors import UsageError
from exportkit.onnx.files import named_model
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.atomic import temporary_folder
from exportkit.package.compiled_with import GivenOptions, compiled_with
from exportkit.package.manifest import Library
from exportkit.package.trust import Trust
from exportkit.progress import Progress, silent
from exportkit.reference_model import ReferenceModel, ReferenceModelFiles, unnamed
from exportkit.sizes import case_sizes
from exportkit.verify.bisect_commands import CutGraph, CutPoint, FailedCall, GraphCut, GraphRead, ReadGraph
from exportkit.verify.eager_plan import plan_eager
from exportkit.verify.located import Located, NodeError, Outcome, bisect, node_errors
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Crashed, EagerDiffers, EagerFailed, Mismatch, TimedOut, Verdict
from exportkit.verify.report import Check, Report
from exportkit.verify.verify import verify
from exportkit.verify.verify_worker import LOAD_TIMEOUT, VerifyWorker


def bisect_artifact(
    artifact: Path, report: Report, options: VerifyOptions, *, ours: bool = False, progress: Progress = silent
) -> Located:
    """Finds the first node where the target of a failed check and eager differ.

    The graph is traced again from MODEL; if none may be imported, the artifact's ExportedProgram is used. Each cut
    takes a compilation. Of a sequence, the first call that differs is repeated from the state that eager has before.

    Args:
        artifact: The artifact.
        report: The report of `verify` with the same options, which failed.
        options: The options of the verification.
        ours: Whether the artifact is the caller's own file. Cuts are compiled with the options that it remembers; of
            other files only with those that name nothing.
        progress: Called with each step before it starts.

    Raises:
        UsageError: No call failed, the artifact is an ONNX model, there is neither a MODEL nor a program, or there is
            no MODEL for a method with state.
        ExportkitError: The graph cannot be traced again.
    """
    if named_model(artifact) is not None:
        raise UsageError("--bisect compares compiled targets with eager", hint="Leave it out for an ONNX model.")
    called = (check for check in report.checks if check.target is not None and check.against in ("cases", "eager"))
    failed = (each for each in called if each.failed and not isinstance(each.verdict, (EagerDiffers, EagerFailed)))
    check = min(failed, key=lambda check: not check.wrong, default=None)
    if check is None:
        raise UsageError(f"no call of {artifact.name} fails, so that there is nothing to search for")
    with (
        PackageReader(artifact, demand=options.trust.demand()) as reader,
        temporary_folder(None, "exportkit-bisect") as folder,
    ):
        reader.verify()
        with _Cuts(reader, check, options, folder, progress, ours=ours) as cuts:
            return cuts.locate()


class _Cuts:
    """The process that cuts the graph of the call that failed, and what came of each cut."""

    def __init__(
        self,
        reader: PackageReader,
        check: Check,
        options: VerifyOptions,
        folder: Path,
        progress: Progress,
        *,
        ours: bool,
    ) -> None:
        self._check, self._options, self._folder, self._progress = check, options, folder, progress
        self._source, self._libraries = reader.manifest.source.model, _extract_libraries(reader, folder)
        self._compiled = any(target.name == check.target for target in reader.manifest.targets)
        self._ways = self._plan_ways(reader, ours=ours)
        self._worker: VerifyWorker | None = None
        self._points: tuple[CutPoint, ...] = ()
        self._failed: dict[int, tuple[Verdict, tuple[NodeError, ...]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._worker is not None:
            self._worker.close()

    def locate(self) -> Located:
        """Searches for the first cut that fails."""
        self._start()
        search, check = bisect(len(self._points), self._fails), self._check
        verdict, errors = (None, ()) if search.fails is None else self._failed[search.fails]
        label, target = check.label, str(check.target)
        return Located(label, dict(check.sizes), target, self._points, search, verdict, errors, check.wrong)

    def _plan_ways(self, reader: PackageReader, *, ours: bool) -> list[ReadGraph]:
        """Returns what may give the graph.

        A library that was given for the artifact may be what is wrong. So MODEL first takes those that it loads itself.
        What came before a call with state is computed by MODEL alone.
        """
        manifest, eager = reader.manifest, self._options.eager
        call = _failed_call(reader, self._check, self._options, self._folder)
        target = next((target for target in manifest.targets if target.name == self._check.target), None)
        given = compiled_with(reader, target) if target else GivenOptions()
        files = ReferenceModelFiles.of(eager, eager.model_of(self._source, self._options.trust.demanded_by()))
        alone = ReadGraph(
            call=call,
            target=str(self._check.target),
            manifest=msgspec.json.encode(manifest).decode(),
            given=given if ours else given.plain,
            eager=msgspec.structs.replace(files, libraries=()),
        )
        ways = []
        if files.model is not None:
            ways.append(alone)
            if files.libraries:
                ways.append(msgspec.structs.replace(alone, eager=files))
        if manifest.program is not None and not manifest.method(call.method).state:
            program = self._folder / "program.pt2"
            reader.extract(manifest.program.records[call.method], program)
            packed = tuple(str(path) for path, library in self._libraries if library.device == "cpu")
            bare = ReferenceModelFiles(None, None, files.libraries or packed)
            ways.append(msgspec.structs.replace(alone, eager=bare, program=str(program)))
        return ways

    def _start(self) -> None:
        """Starts the process that cuts, and lets it read the graph in the first way that works."""
        refusals = []
        for command in self._ways:
            self._progress("reading the program" if command.program else f"tracing {command.eager.model} again")
            self._worker = VerifyWorker("exportkit.verify.bisect_worker", search_path="caller")
            answer = self._worker.ask(command, GraphRead, doing="reading the graph", timeout=self._timeout)
            if isinstance(answer, GraphRead):
                self._points = answer.points
                return
            refusals.append(_reason(answer))
            self._worker.close()
        reason = "\n".join(dict.fromkeys(refusals)) or unnamed(self._source, self._options.trust.demanded_by())
        raise UsageError(f"there is no graph to cut: {reason}", hint="--model names the eager model.")

    @property
    def _timeout(self) -> float:
        return max(self._options.timeout, LOAD_TIMEOUT)

    def _fails(self, cut: int) -> Outcome:
        """Compiles the graph up to a node and verifies it: whether it differs from eager, or why it has no code."""
        point = self._points[cut]
        self._progress(f"cutting after node {cut + 1} of {len(self._points)}, {point.name} ({point.operator})")
        if self._worker is None or not self._worker.alive:
            self._start()
        assert self._worker is not None
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            made = Path(place) / "cut.pt2"
            command, doing = CutGraph(cut, str(made)), f"compiling up to {point.name}"
            answer = self._worker.ask(command, GraphCut, doing=doing, timeout=self._timeout)
            if not isinstance(answer, GraphCut):
                return _reason(answer)
            return self._differs(cut, made)

    def _differs(self, cut: int, made: Path) -> Outcome:
        if self._libraries and self._compiled:
            assemble([made], self._libraries, made)
        with PackageReader(made) as reader:
            manifest, digest = reader.manifest, reader.manifest_sha256
        libraries = ReferenceModel(op_libraries=self._options.eager.op_libraries)
        chosen = replace(self._options, against="cases", cases=(), device="auto", target=None)
        report = verify(made, replace(chosen, trust=Trust(), eager=libraries), unsigned=digest, progress=silent)
        failure = report.failure
        if failure is None or not failure.wrong:
            return False
        if failure.against == "package":
            return failure.verdict.message
        self._failed[cut] = failure.verdict, node_errors(failure.verdict, manifest)
        return True


def _reason(answer: Failed | Crashed | TimedOut) -> str:
    return answer.detail if isinstance(answer, Failed) else answer.message


def _extract_libraries(reader: PackageReader, folder: Path) -> Sequence[tuple[Path, Library]]:
    found = []
    for number, library in enumerate(reader.manifest.libraries):
        place = folder / f"library-{number}"
        place.mkdir()
        path = place / Path(library.record).name
        reader.extract(library.record, path)
        found.append((path, library))
    return found


def _failed_call(reader: PackageReader, check: Check, options: VerifyOptions, folder: Path) -> FailedCall:
    manifest = reader.manifest
    if check.against == "cases":
        case = manifest.cases[int(check.label.split()[1])]
        path = folder / "case.safetensors"
        reader.extract(case.record, path)
        number = _first_wrong_call(check, len(case.calls))
        call, before = case.calls[number], tuple(each.method for each in case.calls[:number])
        return FailedCall(call.method, number, call.sizes, case_sizes(case), str(path), before, options.seed)
    for plan in plan_eager(manifest, options):
        labels = [plan.label(sizes) for sizes in plan.sizes.sizes]
        if check.label in labels:
            seed, sizes, method, number = options.seed + labels.index(check.label), dict(check.sizes), plan.method, 0
            if method is None:  # as sessions are drawn without a draw_sequence; the process that draws them looks
                stateful = [each.name for each in manifest.methods if each.state]
                number = _first_wrong_call(check, 0)
                method = stateful[min(number, len(stateful) - 1)]
            return FailedCall(method, number, sizes, sizes, None, (), seed)
    raise UsageError(f"the check {check.label} is not of this artifact", hint="Give the report of the artifact.")


def _first_wrong_call(check: Check, count: int) -> int:
    """Returns the number of the first call that differs; the last one's if only the state after it does."""
    if not isinstance(check.verdict, Mismatch):
        return 0
    found = next(output.call for output in check.verdict.outputs if not output.agrees)
    return max(0, count - 1) if found is None else found
