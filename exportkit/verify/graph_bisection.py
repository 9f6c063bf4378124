"""Cuts a graph in a process of its own, compiles what is left, and verifies it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from exportkit.child.messages import Failed
from exportkit.errors import UsageError
from exportkit.export.cpu_isas import simd_bits
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.compiled_with import GivenOptions
from exportkit.package.manifest import Library, Manifest, PackagedMethod
from exportkit.package.trust import Trust
from exportkit.progress import Progress, silent
from exportkit.reference_model import ReferenceModel, ReferenceModelFiles, unnamed
from exportkit.verify.bisect_commands import (
    CallInputs,
    CutGraph,
    CutPoint,
    GraphCut,
    GraphRead,
    ReadGraph,
    ReproductionWritten,
    WriteReproduction,
)
from exportkit.verify.bisection import bisect
from exportkit.verify.located import Located, node_errors
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Crashed, TimedOut
from exportkit.verify.report import Check
from exportkit.verify.verify import verify
from exportkit.verify.verify_worker import LOAD_TIMEOUT, VerifyWorker


@dataclass(frozen=True)
class BisectedCall:
    """The call that fails.

    Attributes:
        method: Its method.
        number: Its number in its case or session.
        sizes: Its sizes.
        file: The case's file; None to draw the inputs.
        seed: The seed of inputs that are drawn.
        before: The methods of the calls before it in the case.
        session_sizes: The sizes of the session's state.
    """

    method: PackagedMethod
    number: int
    sizes: Mapping[str, int]
    file: Path | None
    seed: int
    before: tuple[str, ...] = ()
    session_sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def message(self) -> CallInputs:
        """It for the process that cuts."""
        file = str(self.file) if self.file is not None else None
        return CallInputs(self.number, dict(self.sizes), file, self.seed, self.before, dict(self.session_sizes))


@dataclass(frozen=True)
class BisectedGraph:
    """The graph that is cut, and how what a cut leaves is compiled.

    Attributes:
        manifest: The manifest of the artifact.
        label: The check that failed.
        call: The call that failed.
        target: The name of what ran it.
        device: Its device.
        compiled: Whether it is compiled code, or the program itself.
        cpu_isa: The instruction set of the code.
        embed_weights: Whether the weights are inside of the code.
        given: The options that it was compiled with.
        libraries: The operator libraries of the artifact, as files.
        program: The file of the method's exported program, if the artifact has one.
        demanded_by: What requires a signature, if anything does.
    """

    manifest: Manifest
    label: str
    call: BisectedCall
    target: str
    device: str
    compiled: bool = True
    cpu_isa: str | None = None
    embed_weights: bool = False
    given: GivenOptions = GivenOptions()
    libraries: tuple[tuple[Path, Library], ...] = ()
    program: Path | None = None
    demanded_by: str | None = None


class GraphBisection:
    """The process that cuts, the cuts so far, and what came of them.

    Attributes:
        folder: Where its files are.
    """

    def __init__(self, subject: BisectedGraph, options: VerifyOptions, folder: Path, progress: Progress) -> None:
        self._subject, self._options, self.folder, self._progress = subject, options, folder, progress
        self._worker: VerifyWorker | None = None
        self._points: tuple[CutPoint, ...] = ()
        self._failed: dict[int, tuple[Check, Manifest]] = {}
        self._untested: dict[int, str] = {}
        self._input_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._worker is not None:
            self._worker.close()

    def locate(self, budget: int | None = None) -> Located:
        """Searches for the first cut that fails.

        Args:
            budget: The number of cuts to test. None tests as many as needed.
        """
        self._start()
        found = bisect(len(self._points), self._fails, budget=budget)
        failed = self._failed.get(found.fails) if found.fails is not None else None
        return Located(
            label=self._subject.label,
            sizes=dict(self._subject.call.sizes),
            input_bytes=self._input_bytes,
            target=self._subject.target,
            points=self._points,
            search=found,
            verdict=failed[0].verdict if failed else None,
            errors=node_errors(failed[0].verdict, failed[1]) if failed else (),
            untested=self._untested,
        )

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
        source = self._subject.manifest.source.model
        reason = "\n".join(dict.fromkeys(refusals)) or unnamed(source, self._subject.demanded_by)
        raise UsageError(f"there is no graph to cut: {reason}", hint="--model names the eager model.")

    def _ways(self) -> Iterator[ReadGraph]:
        """Yields what may give the graph.

        A library that was given for the artifact may be what is wrong. So MODEL first takes those that it loads itself.
        What came before a call with state is computed by MODEL alone.
        """
        subject, eager = self._subject, self._options.eager
        given = ReferenceModelFiles.of(eager, eager.model_of(subject.manifest.source.model, subject.demanded_by))
        command = ReadGraph(
            eager=msgspec.structs.replace(given, libraries=()),
            program=None,
            method=subject.call.method.name,
            manifest=msgspec.json.encode(subject.manifest).decode(),
            device=subject.device,
            compiled=subject.compiled,
            cpu_isa=subject.cpu_isa,
            embed_weights=subject.embed_weights,
        )
        if given.model is not None:
            yield command
            if given.libraries:
                yield msgspec.structs.replace(command, eager=given)
        if subject.program is not None and not subject.call.method.state:
            packed = tuple(str(path) for path, library in subject.libraries if library.device == "cpu")
            files = ReferenceModelFiles(None, None, given.libraries or packed)
            yield msgspec.structs.replace(command, eager=files, program=str(subject.program))

    def _fails(self, cut: int) -> bool | None:
        """Compiles the graph up to a node and verifies it: whether it differs from eager; None if it has no code."""
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            made = Path(place) / "cut.pt2"
            answer = self._cut(cut, made)
            if isinstance(answer, str):
                self._untested[cut] = answer
                return None
            self._input_bytes = answer.input_bytes
            if self._subject.libraries and self._subject.compiled:
                assemble([made], self._subject.libraries, made)
            return self._judge(cut, made)

    def write_reproduction(
        self, located: Located, depth: int | None, options: Mapping[str, Any], output: Path
    ) -> ReproductionWritten | str:
        """Writes the part of the graph that differs as a Python file, or says why there is none.

        Args:
            located: What `locate` found.
            depth: How many nodes back the file begins; None for the whole graph.
            options: Options of torch._inductor.config that the file sets.
            output: The file.
        """
        assert located.search.fails is not None
        assert self._worker is not None
        if not self._subject.compiled:
            return "the program itself differs, which is not compiled"
        results = tuple(error.name for error in located.errors)
        call = self._subject.call.message
        command = WriteReproduction(located.search.fails, results, call, depth, dict(options), str(output))
        answer = self._worker.ask(command, ReproductionWritten, doing="writing a file", timeout=LOAD_TIMEOUT)
        if isinstance(answer, (Crashed, TimedOut)):
            return answer.message
        return answer.detail if isinstance(answer, Failed) else answer

    @property
    def options(self) -> dict[str, Any]:
        """The options of torch._inductor.config that decide which code is written."""
        bits = simd_bits(self._subject.cpu_isa)
        return {**({"cpp.simdlen": bits} if bits else {}), **self._subject.given.inductor_config}

    def _cut(self, cut: int, made: Path) -> GraphCut | str:
        """Writes the artifact of a cut, or says why there is none."""
        point = self._points[cut]
        self._progress(f"cutting after node {cut + 1} of {len(self._points)}, {point.name} ({point.operator})")
        if self._worker is None or not self._worker.alive:
            self._start()
        assert self._worker is not None
        command = CutGraph(
            point=cut,
            call=self._subject.call.message,
            inductor_config=dict(self._subject.given.inductor_config),
            eager_kernels=self._subject.given.eager_kernels,
            output=str(made),
        )
        timeout = max(self._options.timeout, LOAD_TIMEOUT)
        answer = self._worker.ask(command, GraphCut, doing=f"compiling up to {point.name}", timeout=timeout)
        if isinstance(answer, (Crashed, TimedOut)):
            return answer.message
        return answer.detail if isinstance(answer, Failed) else answer

    def _judge(self, cut: int, made: Path) -> bool | None:
        with PackageReader(made) as reader:
            manifest, digest = reader.manifest, reader.manifest_sha256
        libraries = ReferenceModel(op_libraries=self._options.eager.op_libraries)
        chosen = replace(self._options, against="cases", cases=(), device="auto", target=None)
        options = replace(chosen, trust=Trust(), eager=libraries)
        report = verify(made, options, unsigned=digest, progress=silent)
        failure = report.failure
        if failure is None:
            return False
        if failure.against == "package":
            self._untested[cut] = failure.verdict.message
            return None
        self._failed[cut] = failure, manifest
        return True
