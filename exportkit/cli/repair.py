"""`exportkit export --repair`: looks for options with which compiled code is right, where it is wrong without them.

Each try is the user's own command with more options, in a process of its own, and a verification of what it wrote.
docs/adr/0058-repairs.md says what is tried.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from exportkit import errors
from exportkit.child.messages import Failed, Message, serve
from exportkit.cli.app import main as run_command
from exportkit.errors import CompilationError, CompilerError, ExportError, ExportkitError
from exportkit.export.models.find_libraries import named_libraries
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder, write_whole
from exportkit.package.compiled_with import GivenOptions
from exportkit.package.manifest import Manifest
from exportkit.progress import Progress
from exportkit.reference_model import ReferenceModel
from exportkit.verify import outcomes
from exportkit.verify.bisecting import bisect_artifact
from exportkit.verify.options import VerifyOptions
from exportkit.verify.report import Report
from exportkit.verify.verify import verify
from exportkit.verify.verify_worker import VerifyWorker

_MOST_OPERATORS = 3  # left to eager one after the other: each takes a search
_SECONDS = 3600.0  # of an export
_CODES_FAULT = (  # what other options of the compiler may change
    *(outcomes.Mismatch, outcomes.WrongDtype, outcomes.WrongShape, outcomes.WrongStructure),
    *(outcomes.CallFailed, outcomes.Crashed, outcomes.TimedOut, outcomes.LoadFailed),
)
_AT = re.compile(r"could not compile the program at (\w+\.\w+\.\w+)")


class Remedy(NamedTuple):
    """Options that may make the code right, and their device. None: eager's kernels for operators that go wrong."""

    what: str
    given: GivenOptions | None
    device: str = ""


_EXACT = {"eager_numerics.division_rounding": True, "eager_numerics.use_pytorch_libdevice": True}
_UNFUSED = {"max_fusion_size": 1, "epilogue_fusion": False, "realize_opcount_threshold": 0}
# In the order of what they usually cost.
REMEDIES = (
    Remedy("values rounded to their dtype, as eager does", GivenOptions({"emulate_precision_casts": True})),
    Remedy("division and functions as eager's", GivenOptions(_EXACT), "cuda"),
    Remedy("the operator left to eager's kernel", None),
    Remedy("reductions in one kernel", GivenOptions({"split_reductions": False}), "cuda"),
    Remedy("no patterns replaced in the graph", GivenOptions({"pattern_matcher": False})),
    Remedy("nothing fused", GivenOptions(_UNFUSED)),
    Remedy("no vector instructions written", GivenOptions({"cpp.simdlen": 1}), "cpu"),
)


def remedies(device: str) -> Iterator[tuple[str, GivenOptions | None]]:
    """Yields what to try on a device; at last several together, and every operator left to eager's kernel."""
    chosen = [(remedy.what, remedy.given) for remedy in REMEDIES if device.startswith(remedy.device)]
    yield from chosen
    yield "all of these together", reduce(GivenOptions.with_more, filter(None, (given for _, given in chosen)))
    yield "every operator left to eager's kernel", GivenOptions({}, ("aten",))


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
        return self.report is not None and self.report.exit_code == 0

    @property
    def text(self) -> str:
        """What came of it."""
        failure = self.report.failure if self.report else None
        said = (failure.verdict.message if failure else self.refused).strip().partition("\n")[0][:300]
        return f"{'does not compile' if self.refused else 'differs'}: {said}" if said else "right"

    def __str__(self) -> str:
        """One line."""
        return f"tried {self.what}: {self.text}"


@dataclass
class Repair:
    """A search for options with which the code is right.

    Attributes:
        words: The arguments of `exportkit export`, without --repair.
        eager: The model, as they name it.
        device: Its device.
        seed: The seed of the cases.
        progress: Called with each step before it starts.
        attempts: What was tried, first no more options. The last one is right.
        places: Where the code goes wrong, as far as it was found.
    """

    words: Sequence[str]
    eager: ReferenceModel
    device: str
    seed: int
    progress: Progress
    attempts: list[Attempt] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def run(self, out: Path) -> Manifest:
        """Exports the model and verifies it. If it is wrong or does not compile, tries options until it is right.

        Raises:
            ExportError: Nothing makes the code right. `<name>.repair.txt` beside `out` says what was tried.
            ExportkitError: The model cannot be traced, or its code not be verified.
        """
        with temporary_folder(out.parent, f".{out.name[:200]}") as folder:
            first = last = self._try("no more options", GivenOptions(), folder)
            for what, given in remedies(self.device):
                if last.right:
                    break
                last = self._leave_operators(first) if given is None else self._try(what, given, folder)
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
        tried = [{"what": x.what, "options": x.given.arguments, "result": x.text} for x in self.attempts]
        return {"arguments": self.arguments, "attempts": tried, "places": self.places}

    def _leave_operators(self, last: Attempt) -> Attempt:
        """Leaves the operator at which the code goes wrong to eager's kernel, then the one that is wrong then."""
        for _ in range(_MOST_OPERATORS):
            operator = "" if last.right else self._locate(last)
            if not operator.startswith("aten.") or operator in last.given.eager_kernels:
                break
            given = last.given.with_more(GivenOptions({}, (operator,)))
            last = self._try(f"{', '.join(given.eager_kernels)} left to eager's kernel", given, last.path.parent)
        return last

    def _locate(self, last: Attempt) -> str:
        """Returns the operator at which the code goes wrong, and notes its place; "" if it cannot be found."""
        if last.report is None:
            return found[1] if (found := _AT.search(last.refused)) else ""
        try:
            located = bisect_artifact(last.path, last.report, last.verified, ours=True, progress=self.progress)
        except ExportkitError as error:
            self.places.append(error.message)
            return ""
        self.places.append(located.message if located.point is None else located.place)
        return "" if located.point is None else located.point.operator

    def _try(self, what: str, given: GivenOptions, folder: Path) -> Attempt:
        """Exports the model with more options, and verifies what came of it."""
        self.progress(f"exporting {self.eager.model} in a process of its own: {what}")
        path = folder / f"{len(self.attempts)}.pt2"
        words = [*given.arguments.split(), "--output", str(path), "--json"]
        end = self.words.index("--") if "--" in self.words else len(self.words)
        command = Export(("export", *self.words[:end], *words, *self.words[end:]))
        with VerifyWorker("exportkit.cli.repair", search_path="caller") as worker:
            answer = worker.ask(command, Exported, doing="exporting the model", timeout=_SECONDS)
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
        with PackageReader(path) as reader:
            digest, operators = reader.manifest_sha256, {each.name for each in reader.manifest.operators}
        libraries = named_libraries(self.eager, operators, self.progress)
        saved = str(self.eager.model).endswith(".pt2")
        eager = replace(self.eager, model=None if saved else self.eager.model, op_libraries=libraries)
        options = VerifyOptions(against="cases" if saved else "both", eager=eager, seed=self.seed)
        report = verify(path, options, unsigned=digest, progress=self.progress)
        if report.failure is not None and not isinstance(report.failure.verdict, _CODES_FAULT):
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
