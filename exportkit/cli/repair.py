"""`exportkit export --repair`: looks for what makes compiled code right, where it is wrong.

Each try is the user's own command with more options, in a process of its own, and a verification of what it wrote.
docs/adr/0058-repairs.md says what is tried.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exportkit import errors
from exportkit.child.messages import Failed, Message, serve
from exportkit.cli.app import main as run_command
from exportkit.errors import CompilationError, CompilerError, ExportError, ExportkitError
from exportkit.export.models.find_libraries import named_libraries
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder, write_whole
from exportkit.package.compiled_with import GivenOptions, leave_one
from exportkit.package.manifest import Manifest
from exportkit.progress import Progress
from exportkit.reference_model import ReferenceModel
from exportkit.verify import outcomes
from exportkit.verify.bisecting import bisect_artifact
from exportkit.verify.options import VerifyOptions
from exportkit.verify.report import Report
from exportkit.verify.verify import verify
from exportkit.verify.verify_worker import VerifyWorker

MINUTES = 30  # of the search; what is left to do then is the last way, which is sure to compile
_CODES_FAULT = (  # what other options of the compiler may change
    *(outcomes.Mismatch, outcomes.WrongDtype, outcomes.WrongShape, outcomes.WrongStructure),
    *(outcomes.CallFailed, outcomes.Crashed, outcomes.TimedOut, outcomes.LoadFailed),
)
OPTIONS = (  # of the compiler, in the order of what they usually cost
    ("values rounded to their dtype, as eager does", GivenOptions({"emulate_precision_casts": True})),
    ("no patterns replaced in the graph", GivenOptions({"pattern_matcher": False})),
)
_EVERY = ("every operator left to eager's kernel", GivenOptions({}, ("aten",)))


class Export(Message, frozen=True):
    """Tells a process to run `exportkit export` with these arguments. The answer is Exported."""

    words: tuple[str, ...]


class Exported(Message, frozen=True):
    """The exit code of the command, and what it printed as JSON."""

    code: int
    document: dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """An export with some options: its artifact with its verification, or why the compiler refused the program."""

    what: str
    given: GivenOptions
    path: Path
    refused: str = ""
    report: Report | None = None
    verified: VerifyOptions = VerifyOptions()

    @property
    def right(self) -> bool:
        """Whether it compiled and passed."""
        return self.report is not None and not self.report.wrong

    def __str__(self) -> str:
        """What was tried, and what came of it, in one line."""
        failure = self.report.failure if self.report else None
        said = (failure.verdict.message if failure else self.refused).strip().partition("\n")[0][:300]
        result = f"{'does not compile' if self.refused else 'differs'}: {said}" if said else "right"
        return f"tried {self.what}: {result}"


class _TimeIsUpError(Exception):
    """The time for the search has ended."""


@dataclass
class Repair:
    """A search for what makes the code right: nodes left to eager's kernels, then options of the compiler.

    Attributes:
        words: The arguments of `exportkit export`, without --repair.
        eager: The model, as they name it.
        seed: The seed of the cases.
        progress: Called with each step before it starts.
        attempts: What was tried, first no more options. The last one is right.
        places: Where the code goes wrong, as far as it was found.
    """

    words: Sequence[str]
    eager: ReferenceModel
    seed: int
    progress: Progress
    attempts: list[Attempt] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    _end: float = 0.0

    def run(self, out: Path) -> Manifest:
        """Exports the model and verifies it. If it is wrong or does not compile, looks for what makes it right.

        Raises:
            ExportError: Nothing makes the code right. `<name>.repair.txt` beside `out` says what was tried.
            ExportkitError: The model cannot be traced, or its code not be verified.
        """
        with temporary_folder(out.parent, f".{out.name[:200]}") as folder:
            last = self._try("no more options", GivenOptions(), folder)
            self._end = time.monotonic() + 60 * MINUTES
            with suppress(_TimeIsUpError):
                last = self._leave_nodes(last)
                for option in OPTIONS:
                    last = last if last.right else self._try(*option, folder)
            self._end = math.inf
            last = last if last.right else self._try(*_EVERY, folder)
            if not last.right:
                raise self._refusal(out)
            with PackageReader(last.path) as reader:
                manifest = reader.manifest
            os.replace(last.path, out)
        return manifest

    @property
    def arguments(self) -> str:
        """The arguments that make the code right; "" if it was right without."""
        return self.attempts[-1].given.arguments

    def document(self) -> dict[str, Any]:
        """Returns the repair as JSON."""
        tried = [{"options": each.given.arguments, "result": str(each)} for each in self.attempts]
        return {"arguments": self.arguments, "attempts": tried, "places": self.places}

    def _step(self, text: str) -> None:
        """Says what happens next, and how much time the search has for it."""
        left = self._end - time.monotonic()
        if self._end and left < 0:
            raise _TimeIsUpError
        self.progress(f"{text}, {left / 60:.0f} of {MINUTES} minutes left" if 0 < left < math.inf else text)

    def _leave_nodes(self, last: Attempt) -> Attempt:
        """Leaves the node at which the code goes wrong to eager's kernel, then the one that is wrong then."""
        while last.report is not None and not last.right:
            try:
                located = bisect_artifact(last.path, last.report, last.verified, ours=True, progress=self._step)
            except ExportkitError as error:
                self.places.append(error.message)
                break
            self.places.append(located.message if located.point is None else located.place)
            point = located.point
            left = leave_one(last.given.eager_kernels, point.place) if point and point.place else ()
            if not left or left == last.given.eager_kernels:
                break
            what = f"{', '.join(left)} left to eager's kernel"
            last = self._try(what, GivenOptions({}, left), last.path.parent)
        return last

    def _try(self, what: str, given: GivenOptions, folder: Path) -> Attempt:
        """Exports the model with more options, and verifies what came of it."""
        self._step(f"exporting {self.eager.model} in a process of its own: {what}")
        path = folder / f"{len(self.attempts)}.pt2"
        words = [*given.arguments.split(), "--output", str(path), "--json"]
        end = self.words.index("--") if "--" in self.words else len(self.words)
        command = Export(("export", *self.words[:end], *words, *self.words[end:]))
        with VerifyWorker("exportkit.cli.repair", search_path="caller") as worker:
            answer = worker.ask(command, Exported, doing="exporting the model", timeout=60 * MINUTES)
        if isinstance(answer, Failed):
            raise answer.exception()
        if not isinstance(answer, Exported):
            attempt = Attempt(what, given, path, answer.message)
        elif answer.code:
            attempt = Attempt(what, given, path, self._refused(answer.document["error"]))
        else:
            attempt = Attempt(what, given, path, "", *self._verify(path))
        self.attempts.append(attempt)
        return attempt

    def _refused(self, error: Mapping[str, Any]) -> str:
        """Returns why a try did not compile. The first one may have failed before that: this raises its error."""
        kind = getattr(errors, error["kind"], ExportError)
        if not self.attempts and not issubclass(kind, (CompilationError, CompilerError)):
            raise kind(error["message"], hint=error["hint"])
        return str(error["message"])

    def _verify(self, path: Path) -> tuple[Report, VerifyOptions]:
        """Verifies what was written twice, with other inputs, in memory that was filled before each call."""
        with PackageReader(path) as reader:
            digest, operators = reader.manifest_sha256, {each.name for each in reader.manifest.operators}
        libraries = named_libraries(self.eager, operators, self.progress)
        saved = str(self.eager.model).endswith(".pt2")
        eager = replace(self.eager, model=None if saved else self.eager.model, op_libraries=libraries)
        for seed in (self.seed, self.seed + 1):
            options = VerifyOptions(against="cases" if saved else "both", eager=eager, seed=seed)
            report = verify(path, options, unsigned=digest, progress=self.progress)
            if report.wrong:
                break
        if report.wrong and report.failure and not isinstance(report.failure.verdict, _CODES_FAULT):
            said = f"the compiled code cannot be verified: {report.failure.verdict.message}"
            raise ExportError(said, hint="Without --repair, nothing is verified here.")
        return report, options

    def _refusal(self, out: Path) -> ExportError:
        file = out.with_name(f"{out.name}.repair.txt")
        lines = ["nothing that was tried makes the compiled code right", *map(str, self.attempts), *self.places]
        write_whole(file, "\n".join(lines).encode() + b"\n")
        way = f"{file} has this report. `--format program` writes the program, which is not compiled."
        return ExportError("\n".join(lines), hint=way)


def main(connection: socket.socket) -> None:
    """Entry point of the process of a try."""

    def export(command: Export) -> Exported:
        with redirect_stdout(io.StringIO()) as printed:
            code = run_command(command.words)
        return Exported(code, json.loads(printed.getvalue()))

    serve(connection, {Export: export})
