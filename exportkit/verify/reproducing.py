"""Writes the part of a graph that differs as a file that needs torch alone, and runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exportkit.child.messages import Failed
from exportkit.package.atomic import write_whole
from exportkit.progress import Progress
from exportkit.verify.bisect_commands import (
    CauseNamed,
    NameCause,
    ReproductionRan,
    ReproductionWritten,
    RunReproduction,
)
from exportkit.verify.graph_bisection import GraphBisection
from exportkit.verify.located import Located
from exportkit.verify.outcomes import Crashed, TimedOut
from exportkit.verify.verify_worker import LOAD_TIMEOUT, VerifyWorker

_DEPTHS = (1, 3, None)  # nodes back from what differs: the fewest that show it are written


@dataclass(frozen=True)
class Reproduced:
    """A file that shows a difference by itself.

    Attributes:
        file: The file; None if none shows it.
        nodes: How many nodes it calls.
        cause: The part of Inductor that torch's own bisector names, in words.
        reason: Why there is no file.
    """

    file: Path | None = None
    nodes: int = 0
    cause: str = ""
    reason: str = ""

    @property
    def message(self) -> str:
        """It in lines."""
        if self.file is None:
            return f"no file reproduces it with torch alone: {self.reason}"
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.file} shows it with torch alone, in {nodes}; attach it to a report to PyTorch\n{self.cause}"


def reproduce(search: GraphBisection, located: Located, out: Path, progress: Progress) -> Reproduced:
    """Writes the smallest part of the graph that differs with torch.compile, too, and lets torch name the cause.

    Args:
        search: The search, which is open.
        located: What it found.
        out: The file to write.
        progress: Called with each step before it starts.
    """
    if located.search.fails is None:
        return Reproduced(reason="no node was found")
    reason, tried, trial = "", 0, search.folder / "reproduction.py"
    with VerifyWorker("exportkit.verify.reproduce_worker", search_path="installed") as worker:
        for depth in _DEPTHS:
            written = search.write_reproduction(located, depth, search.options, trial)
            if not isinstance(written, ReproductionWritten):
                return Reproduced(reason=written)
            if written.nodes == tried:
                continue
            tried = written.nodes
            progress(f"running {tried} nodes with torch alone")
            ran = worker.ask(RunReproduction(str(trial)), ReproductionRan, doing="running them", timeout=LOAD_TIMEOUT)
            if not isinstance(ran, ReproductionRan):
                return Reproduced(reason=_why(ran))
            if ran.differs:
                progress("searching Inductor with torch's own bisector")
                cause = worker.ask(NameCause(str(trial)), CauseNamed, doing="searching", timeout=LOAD_TIMEOUT)
                try:
                    write_whole(out, trial.read_bytes())
                except OSError as error:
                    return Reproduced(reason=f"{out} cannot be written: {error.strerror}")
                named = cause.cause if isinstance(cause, CauseNamed) else f"torch's own bisector failed: {_why(cause)}"
                return Reproduced(out, tried, named)
            reason = "torch.compile agrees with eager there" + (" for drawn inputs" if written.drawn else "")
    return Reproduced(reason=reason)


def _why(answer: Failed | Crashed | TimedOut) -> str:
    return answer.message.partition("\n")[0]
