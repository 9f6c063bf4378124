"""Finds the first node of the graph where compiled code and eager differ.

The graph is cut after one node after the other, by bisection. What a cut leaves is compiled like the whole model, and
verified like any artifact: against one case, which the same graph in eager mode has recorded, with float64 references.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from exportkit.child.messages import Failed
from exportkit.eager_source import EagerFiles, EagerSource, unnamed
from exportkit.errors import UsageError
from exportkit.onnx.files import named_model
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.atomic import temporary_folder
from exportkit.package.manifest import Accuracy, Library, Manifest, PackagedMethod
from exportkit.package.trust import Trust
from exportkit.progress import Progress, silent
from exportkit.verify.bisect_commands import CutGraph, CutPoint, GraphCut, GraphRead, ReadGraph
from exportkit.verify.bisection import Bisection, bisect
from exportkit.verify.eager_plan import plan_eager
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Crashed, Mismatch, TimedOut, Verdict
from exportkit.verify.report import Check, Report
from exportkit.verify.verify import verify
from exportkit.verify.verify_worker import LOAD_TIMEOUT, VerifyWorker

FUSION = (
    "Each cut makes values results that the whole model keeps inside, which changes what the compiler fuses. A "
    "difference that comes from fusion may therefore vanish, or appear at another node."
)


@dataclass(frozen=True)
class NodeError:
    """A value after a cut that differs.

    Attributes:
        name: The name of its node.
        message: How the compiled code's value differs, as a verification says it.
        compiled: The compiled code's error against the float64 reference; None if there is no reference.
        eager: Eager's error against the same reference.
    """

    name: str
    message: str
    compiled: Accuracy | None
    eager: Accuracy | None


@dataclass(frozen=True)
class Located:
    """What a bisection found.

    Attributes:
        label: The check of the verification that it began with.
        sizes: The sizes of that check's case, by dimension.
        input_bytes: The bytes of the case's inputs.
        target: The target that differs.
        points: The nodes after which the graph can be cut.
        search: Which cuts were tested, and where they begin to fail.
        verdict: How the first failing cut fails; None if the whole graph, compiled again, agrees.
        errors: The values that differ after the first failing cut.
        untested: By cut, why it could not be tested.
    """

    label: str
    sizes: dict[str, int]
    input_bytes: int
    target: str
    points: tuple[CutPoint, ...]
    search: Bisection
    verdict: Verdict | None
    errors: tuple[NodeError, ...]
    untested: dict[int, str] = field(default_factory=dict)

    @property
    def point(self) -> CutPoint | None:
        """The node after which values begin to differ."""
        return None if self.search.fails is None else self.points[self.search.fails]

    @property
    def message(self) -> str:
        """The finding, in lines."""
        case = f"{self.label} of {self.target}, with {self.input_bytes} bytes of inputs"
        tested = f"{len(self.search.tested)} cuts of {len(self.points)} were tested."
        if self.point is None or self.search.fails is None:
            why = self.untested.get(len(self.points) - 1)
            if why is not None:
                return f"the whole graph could not be compiled again for {case}: {why}"
            return (
                f"the whole graph, traced and compiled again, agrees with eager for {case}.\n"
                "So the difference comes from the artifact: from another build of the code or of a library, from other "
                "options of the compiler, or from a model that has changed since."
            )
        lines = [f"first difference: {self._node(self.search.fails)}", f"for {case}"]
        lines += [f"  {error.message}{_against_eager(error)}" for error in self.errors]
        if not self.errors and self.verdict is not None:
            lines += [f"  {line}" for line in self.verdict.message.splitlines()]
        if self.search.passes is not None:
            lines.append(f"the graph up to {self._node(self.search.passes)} agrees")
        if not self.search.exact:
            between = self.search.fails - (0 if self.search.passes is None else self.search.passes + 1)
            lines.append(f"nodes before it that were not decided: {between}; one of them may be the first")
            lines += [f"  {self.points[cut].name}: {why}" for cut, why in sorted(self.untested.items())][:4]
        elif self.errors and not any(error.name in self.point.values for error in self.errors):
            lines.append("only values of earlier nodes differ, which agreed after an earlier cut: fusion decides")
        return "\n".join([*lines, f"{tested} {FUSION}"])

    def document(self) -> dict[str, Any]:
        """Returns all of it as JSON."""
        point, search = self.point, self.search
        return {
            "message": self.message,
            "node": None if point is None else {"number": search.fails, **msgspec.to_builtins(point)},
            "exact": search.exact,
            "errors": [msgspec.to_builtins(error) for error in self.errors],
            "case": {"label": self.label, "sizes": self.sizes, "input_bytes": self.input_bytes, "target": self.target},
            "nodes": len(self.points),
            "tested": {self.points[cut].name: failed for cut, failed in sorted(search.tested.items())},
            "untested": {self.points[cut].name: why for cut, why in sorted(self.untested.items())},
        }

    def _node(self, cut: int) -> str:
        point = self.points[cut]
        where = f", {point.where}" if point.where else ""
        return f"node {cut + 1} of {len(self.points)}, {point.name} ({point.operator}){where}"


def _against_eager(error: NodeError) -> str:
    if error.eager is None:
        return ""
    return f"; eager's own errors: rms {error.eager.rms:.3g}, greatest {error.eager.greatest:.3g}"


def bisect_artifact(
    artifact: Path,
    report: Report,
    options: VerifyOptions,
    *,
    budget: int | None = None,
    progress: Progress = silent,
) -> Located:
    """Finds the first node where the target of a failed check and eager differ.

    The graph is traced again from MODEL; if none may be imported, the artifact's ExportedProgram is used. Each cut
    takes a compilation. Of a sequence, the first call that differs is named: the graph of a method with state is not
    cut.

    Args:
        artifact: The artifact.
        report: The report of `verify` with the same options, which failed.
        options: The options of the verification.
        budget: The number of cuts to compile. None compiles as many as needed.
        progress: Called with each step before it starts.

    Raises:
        UsageError: No call failed, the method has state, the artifact is an ONNX model, or there is neither a MODEL nor
            a program.
        ExportkitError: The graph cannot be traced again.
    """
    if named_model(artifact) is not None:
        raise UsageError("--bisect compares compiled targets with eager", hint="Leave it out for an ONNX model.")
    called = (check for check in report.checks if check.target is not None and check.against in ("cases", "eager"))
    check = next((check for check in called if check.failed), None)
    if check is None:
        raise UsageError(
            f"no call of {artifact.name} fails, so that there is nothing to search for",
            hint="--bisect searches for the node where an answer begins to differ.",
        )
    with ExitStack() as stack:
        reader = stack.enter_context(PackageReader(artifact, demand=options.trust.demand()))
        reader.verify()
        folder = stack.enter_context(temporary_folder(None, "exportkit-bisect"))
        search = _Search(reader, check, options, folder, progress)
        stack.callback(search.close)
        return search.run(budget)


@dataclass(frozen=True)
class _FailedCall:
    """The call that failed: its method, its number in its case, its sizes, and the case's file or the inputs' seed."""

    method: PackagedMethod
    number: int
    sizes: Mapping[str, int]
    file: Path | None
    seed: int


class _Search:
    """The process that cuts, the cuts so far, and what came of them."""

    def __init__(
        self, reader: PackageReader, check: Check, options: VerifyOptions, folder: Path, progress: Progress
    ) -> None:
        self._reader, self._check, self._options, self._folder = reader, check, options, folder
        self._demanded, self._progress = options.trust.demanded_by(), progress
        self._worker: VerifyWorker | None = None
        self._points: tuple[CutPoint, ...] = ()
        self._failed: dict[int, tuple[Check, Manifest]] = {}
        self._untested: dict[int, str] = {}
        self._input_bytes = 0
        self._call = self._failed_call()
        _refuse_state(self._call.method, check)
        self._libraries = self._extract_libraries()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def run(self, budget: int | None) -> Located:
        self._start()
        found = bisect(len(self._points), self._fails, budget=budget)
        verdict: Verdict | None = None
        errors: tuple[NodeError, ...] = ()
        if found.fails is not None:
            check, manifest = self._failed[found.fails]
            verdict, errors = check.verdict, _errors(check.verdict, manifest)
        return Located(
            label=self._check.label,
            sizes=dict(self._call.sizes),
            input_bytes=self._input_bytes,
            target=str(self._check.target),
            points=self._points,
            search=found,
            verdict=verdict,
            errors=errors,
            untested=self._untested,
        )

    @property
    def _target(self) -> str | None:
        names = [target.name for target in self._reader.manifest.targets]
        return self._check.target if self._check.target in names else None

    def _extract_libraries(self) -> list[tuple[Path, Library]]:
        found = []
        for number, library in enumerate(self._reader.manifest.libraries):
            place = self._folder / f"library-{number}"
            place.mkdir()
            path = place / Path(library.record).name
            self._reader.extract(library.record, path)
            found.append((path, library))
        return found

    def _failed_call(self) -> _FailedCall:
        check, manifest = self._check, self._reader.manifest
        if check.against == "cases":
            case = manifest.cases[int(check.label.split()[1])]
            path = self._folder / "case.safetensors"
            self._reader.extract(case.record, path)
            number = _first_wrong_call(check) or 0
            call = case.calls[number]
            return _FailedCall(manifest.method(call.method), number, call.sizes, path, self._options.seed)
        for plan in plan_eager(manifest, self._options):
            labels = [plan.label(sizes) for sizes in plan.sizes.sizes]
            if check.label in labels:
                stateful = [method for method in manifest.methods if method.state]
                method = stateful[-1] if plan.method is None else manifest.method(plan.method)
                seed = self._options.seed + labels.index(check.label)
                return _FailedCall(method, 0, check.sizes, None, seed)
        raise UsageError(f"the check {check.label} is not of this artifact", hint="Give the report of the artifact.")

    def _start(self) -> None:
        """Starts the process that cuts, and lets it read the graph in the first way that works."""
        refusals = []
        for command in self._ways():
            self._progress("reading the program" if command.program else f"tracing {command.eager.model} again")
            self._worker = VerifyWorker("exportkit.verify.bisect_worker", search_path="caller")
            timeout = max(self._options.timeout, LOAD_TIMEOUT)
            answer = self._worker.ask(command, GraphRead, doing="reading the graph", timeout=timeout)
            if isinstance(answer, GraphRead) and answer.points:
                self._points = answer.points
                return
            if isinstance(answer, GraphRead):
                raise UsageError("the graph has no node, so that there is nothing to cut")
            refusals.append(answer.detail if isinstance(answer, Failed) else answer.message)
            self._worker.close()
        source = self._reader.manifest.source.model
        reason = "\n".join(dict.fromkeys(refusals)) or unnamed(source, self._demanded)
        raise UsageError(f"there is no graph to cut: {reason}", hint="--model names the eager model.")

    def _ways(self) -> Iterator[ReadGraph]:
        """Yields what may give the graph.

        A library that was given for the artifact may be what is wrong. So MODEL first takes those that it loads itself.
        """
        manifest, options = self._reader.manifest, self._options
        device = next((target.device for target in manifest.targets if target.name == self._target), None)
        given = EagerFiles.of(options.eager, options.eager.model_of(manifest.source.model, self._demanded))
        command = ReadGraph(
            eager=msgspec.structs.replace(given, libraries=()),
            program=None,
            method=self._call.method.name,
            manifest=msgspec.json.encode(manifest).decode(),
            target=self._target,
            device=device or "cpu",
        )
        if given.model is not None:
            yield command
            if given.libraries:
                yield msgspec.structs.replace(command, eager=given)
        if manifest.program is not None:
            program = self._folder / "program.pt2"
            self._reader.extract(manifest.program.records[self._call.method.name], program)
            packed = tuple(str(path) for path, library in self._libraries if library.device == "cpu")
            yield msgspec.structs.replace(
                command,
                eager=EagerFiles(None, None, given.libraries or packed),
                program=str(program),
                device=device or manifest.program.device,
            )

    def _fails(self, cut: int) -> bool | None:
        """Compiles the graph up to a node and verifies it. None if that cannot be done."""
        point = self._points[cut]
        self._progress(f"cutting after node {cut + 1} of {len(self._points)}, {point.name} ({point.operator})")
        if self._worker is None or not self._worker.alive:
            self._start()
        assert self._worker is not None
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            made = Path(place) / "cut.pt2"
            command = CutGraph(
                point=cut,
                number=self._call.number,
                sizes=dict(self._call.sizes),
                inputs=str(self._call.file) if self._call.file is not None else None,
                seed=self._call.seed,
                output=str(made),
            )
            timeout = max(self._options.timeout, LOAD_TIMEOUT)
            answer = self._worker.ask(command, GraphCut, doing=f"compiling up to {point.name}", timeout=timeout)
            if isinstance(answer, (Failed, Crashed, TimedOut)):
                self._untested[cut] = answer.detail if isinstance(answer, Failed) else answer.message
                return None
            self._input_bytes = answer.input_bytes
            if self._libraries and self._target is not None:
                assemble([made], self._libraries, made)
            return self._judge(cut, made)

    def _judge(self, cut: int, made: Path) -> bool | None:
        with PackageReader(made) as reader:
            manifest, digest = reader.manifest, reader.manifest_sha256
        libraries = EagerSource(op_libraries=self._options.eager.op_libraries)
        options = replace(self._options, against="cases", device="auto", target=None, trust=Trust(), eager=libraries)
        report = verify(made, options, unsigned=digest, progress=silent)
        failure = report.failure
        if failure is None:
            return False
        if failure.against == "package":
            self._untested[cut] = failure.verdict.message
            return None
        self._failed[cut] = failure, manifest
        return True


def _first_wrong_call(check: Check) -> int | None:
    """Returns the number of the first call of a sequence that differs; None if only the state after it does."""
    if not isinstance(check.verdict, Mismatch):
        return 0
    return next(output.call for output in check.verdict.outputs if not output.agrees)


def _refuse_state(method: PackagedMethod, check: Check) -> None:
    """Raises UsageError for a method whose graph cannot be cut, with what is known of the difference."""
    if not method.state:
        return
    where = check.verdict.message.partition("\n")[0]
    raise UsageError(
        f"the first difference of {check.label} is in {where}",
        hint=f"The graph of {method.name} is not searched, because it has state: what a cut computes depends on the "
        "calls before it. `--against eager --shapes 1` with a short draw_sequence narrows it down.",
    )


def _errors(verdict: Verdict, manifest: Manifest) -> tuple[NodeError, ...]:
    """Returns the values that differ, with eager's errors in the same case."""
    if not isinstance(verdict, Mismatch):
        return ()
    eager = manifest.cases[0].calls[0].accuracy
    return tuple(
        NodeError(
            name=output.name,
            message=str(output),
            compiled=Accuracy(rms=output.error.rms, greatest=output.error.greatest) if output.error else None,
            eager=eager.get(output.name),
        )
        for output in verdict.outputs
        if not output.agrees
    )
