"""`exportkit export --repair`: looks for options with which compiled code is right, where it is wrong without them.

Each try is the user's own command with more options, in a process of its own, and a verification of what it wrote.
docs/adr/0058-repairs.md says what is tried.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from exportkit import errors
from exportkit.errors import CompilationError, CompilerError, ExportError, ExportkitError
from exportkit.export.models.find_libraries import named_libraries
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder, write_whole
from exportkit.package.compiled_with import GivenOptions
from exportkit.package.manifest import Manifest
from exportkit.progress import Progress
from exportkit.reference_model import ReferenceModel
from exportkit.verify import outcomes
from exportkit.verify.bisecting import searching
from exportkit.verify.options import VerifyOptions
from exportkit.verify.report import Report
from exportkit.verify.verify import verify

_MOST_OPERATORS = 3  # left to eager one after the other: each takes a search
_CODES_FAULT = (  # what other options of the compiler may change
    *(outcomes.Mismatch, outcomes.WrongDtype, outcomes.WrongShape, outcomes.WrongStructure),
    *(outcomes.CallFailed, outcomes.Crashed, outcomes.TimedOut, outcomes.LoadFailed),
)
_AT = re.compile(r"could not compile the program at (\w+\.\w+\.\w+)")

# What users turn on and what costs accuracy, with torch's own value.
_STRICT = {
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    "emulate_precision_casts": True,
}


class Remedy(NamedTuple):
    """Options that may make the code right, and their device. None: eager's kernels for operators that go wrong."""

    what: str
    options: Mapping[str, Any] | None
    device: str = ""


# In the order of what they usually cost.
REMEDIES = (
    Remedy("values rounded to their dtype, as eager does", {"emulate_precision_casts": True}),
    Remedy(
        "division and functions as eager's",
        {"eager_numerics.division_rounding": True, "eager_numerics.use_pytorch_libdevice": True},
        "cuda",
    ),
    Remedy("the operator left to eager's kernel", None),
    Remedy("reductions in one kernel", {"split_reductions": False}, "cuda"),
    Remedy("no patterns replaced in the graph", {"pattern_matcher": False}),
    Remedy("nothing fused", {"max_fusion_size": 1, "epilogue_fusion": False, "realize_opcount_threshold": 0}),
    Remedy("no vector instructions written", {"cpp.simdlen": 1}, "cpu"),
)


def remedies(device: str, asked: Mapping[str, Any]) -> Iterator[tuple[str, GivenOptions | None]]:
    """Yields what to try on a device, beside what the user asked for; at last several together, and all to eager."""
    allowed = {name: value for name, value in _STRICT.items() if asked.get(name, value) != value}
    first = [Remedy("without the options that allow inaccurate code", allowed)] if allowed else []
    chosen = [*first, *(remedy for remedy in REMEDIES if device.startswith(remedy.device))]
    given = [None if remedy.options is None else GivenOptions(remedy.options) for remedy in chosen]
    yield from zip((remedy.what for remedy in chosen), given)
    yield "all of these together", reduce(GivenOptions.with_more, filter(None, given))
    yield "every operator left to eager's kernel", GivenOptions({}, ("aten",))


@dataclass(frozen=True)
class Attempt:
    """An export with some options: its artifact with its verification, or why the compiler refused the program."""

    what: str
    given: GivenOptions
    path: Path
    refused: str = ""
    report: Report | None = None
    verified: VerifyOptions = VerifyOptions()
    seconds: float = 0

    @property
    def right(self) -> bool:
        """Whether it compiled and passed."""
        return self.report is not None and self.report.exit_code == 0

    @property
    def text(self) -> str:
        """What came of it, in one line."""
        failure = self.report.failure if self.report else None
        said = (failure.verdict.message if failure else self.refused).strip().partition("\n")[0][:300]
        return f"{'does not compile' if self.refused else 'differs'}: {said}" if said else "right"

    def __str__(self) -> str:
        """One line."""
        return f"tried {self.what}: {self.text} ({self.seconds:.0f} s)"


@dataclass
class Repair:
    """A search for options with which the code is right.

    Attributes:
        words: The arguments of `exportkit export`, without --repair.
        eager: The model, as they name it.
        device: Its device.
        asked: The options of the compiler among them.
        seed: The seed of the cases.
        progress: Called with each step before it starts.
        problem: What is wrong without more options, in lines; none if nothing is.
        attempts: What was tried. The last one is right.
    """

    words: Sequence[str]
    eager: ReferenceModel
    device: str
    asked: Mapping[str, Any]
    seed: int
    progress: Progress
    problem: list[str] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)

    def run(self, out: Path) -> Manifest:
        """Exports the model and verifies it. If it is wrong or does not compile, tries options until it is right.

        Raises:
            ExportError: Nothing makes the code right. `<name>.repair.txt` beside `out` says what was tried.
            ExportkitError: The model cannot be traced, or its code not be verified.
        """
        with temporary_folder(out.parent, f".{out.name[:200]}") as folder:
            found = self._export("no more options", GivenOptions(), folder)
            if not found.right:
                self.problem.append(f"the {'model' if found.refused else 'compiled code'} {found.text}")
                found = self._look(found)
            if not found.right:
                raise self._refusal(out)
            with PackageReader(found.path) as reader:
                manifest = reader.manifest
            os.replace(found.path, out)
        return manifest

    @property
    def arguments(self) -> str:
        """The arguments that make the code right; "" if it was right without."""
        return self.attempts[-1].given.arguments if self.attempts else ""

    def document(self) -> dict[str, Any]:
        """Returns the repair as JSON."""
        tried = [{"what": x.what, "options": x.given.arguments, "result": x.text} for x in self.attempts]
        return {"problem": "\n".join(self.problem), "arguments": self.arguments, "attempts": tried}

    def _look(self, first: Attempt) -> Attempt:
        last = first
        for what, given in remedies(self.device, self.asked):
            last = self._leave_operators(first) if given is None else self._try(what, given, first)
            if last.right:
                break
        return last

    def _leave_operators(self, last: Attempt) -> Attempt:
        """Leaves the operator at which the code goes wrong to eager's kernel, then the one that is wrong then."""
        for _ in range(_MOST_OPERATORS):
            operator = "" if last.right else self._locate(last)
            if not operator.startswith("aten.") or operator in last.given.eager_kernels:
                break
            given = last.given.with_more(GivenOptions({}, (operator,)))
            last = self._try(f"{', '.join(given.eager_kernels)} left to eager's kernel", given, last)
        return last

    def _locate(self, last: Attempt) -> str:
        """Returns the operator at which the code goes wrong, and notes its place; "" if it cannot be found."""
        if last.report is None:
            found = _AT.search(last.refused)
            return found[1] if found else ""
        try:
            with searching(last.path, last.report, last.verified, ours=True, progress=self.progress) as search:
                located = search.locate()
        except ExportkitError as error:
            self.problem.append(error.message)
            return ""
        self.problem.append(located.message if located.point is None else located.place)
        return "" if located.point is None else located.point.operator

    def _try(self, what: str, given: GivenOptions, last: Attempt) -> Attempt:
        begin = time.monotonic()
        attempt = self._export(what, given, last.path.parent)
        self.attempts.append(replace(attempt, seconds=time.monotonic() - begin))
        return attempt

    def _export(self, what: str, given: GivenOptions, folder: Path) -> Attempt:
        """Exports the model with more options, and verifies what came of it."""
        self.progress(f"exporting {self.eager.model} in a process of its own: {what}")
        path = folder / f"{len(self.attempts)}.pt2"
        words = [*given.arguments.split(), "--output", str(path), "--json"]
        end = self.words.index("--") if "--" in self.words else len(self.words)
        command = [sys.executable, "-P", "-m", "exportkit", "export", *self.words[:end], *words, *self.words[end:]]
        same = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=same, check=False)
        if done.returncode:
            return Attempt(what, given, path, self._refused(done.stdout))
        return Attempt(what, given, path, "", *self._verify(path))

    def _refused(self, said: str) -> str:
        """Returns why a try did not compile. The first one may have failed before that: this raises its error."""
        error = json.loads(said)["error"]
        kind = getattr(errors, error["kind"], ExportError)
        if not self.problem and not issubclass(kind, (CompilationError, CompilerError)):
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
        lines = [*self.problem, *map(str, self.attempts)]
        write_whole(file, "\n".join(lines).encode() + b"\n")
        return ExportError(
            "\n".join(["nothing that was tried makes the compiled code right", *lines]),
            hint=f"{file} has this report. `--format program` writes the program, which is not compiled.",
        )
