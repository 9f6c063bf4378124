"""Times kernels that a program wrote beside their references, in the two processes of their judge.

Each round has new values, drawn by the judge, and each timed answer is compared. So a kernel that keeps its answers, or
computes nothing while it is timed, is found.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from exportkit.child.child_client import ChildEndedError
from exportkit.errors import UsageError, WrongResultError
from exportkit.operators.tools.candidate import (
    CallsMade,
    CandidateLoaded,
    DrawJudgedCalls,
    JudgeAnswers,
    Judged,
    JudgedCalls,
    LoadCandidate,
    MakeCalls,
    given_for,
    how_it_ended,
    loaded,
    two_processes,
)
from exportkit.operators.tools.checking import CheckOptions
from exportkit.operators.tools.source import OperatorSource
from exportkit.progress import Progress

CANDIDATE = "candidate"
_LEAST_ROUNDS, _MOST_ROUNDS = 7, 100


@dataclass
class TimedCall:
    """The times of one call, by who computed it, CANDIDATE or one of `against`: one number for each round.

    `moved_bytes` are those of its inputs and outputs. `clocks` are the device's after each round, in MHz; 0 where it is
    not known.
    """

    operator: str
    sizes: str
    dtype: str
    moved_bytes: int
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    clocks: list[float] = field(default_factory=list)


def timed(
    source: OperatorSource, options: CheckOptions, against: Sequence[str], seconds: float, progress: Progress
) -> Iterator[TimedCall]:
    """Times the calls that the user gave, operator by operator, beside the ways `against` which the reference runs.

    An operator takes about so many seconds for all rounds.

    Raises:
        UsageError: The library has no such operator, or the user gave no calls or no reference for it.
        WrongResultError: Kernel or reference refuses a call, or ends its process, or their answers differ.
    """
    for operator, schema in loaded(source, options, (*options.references, *options.calls)).schemas.items():
        reference, calls = given_for(operator, options.references), given_for(operator, options.calls)
        if reference is None or calls is None:
            lacking = "--reference" if reference is None else "--calls"
            raise UsageError(f"{operator} has no {lacking}", hint=f"Give {lacking} {operator}=FILE.py:FUNCTION.")
        progress(f"timing {operator}")
        draw = DrawJudgedCalls(operator, schema, reference, calls, options, "", drawn=False)
        yield from _timed_operator(source, options, draw, against, seconds)


def _timed_operator(
    source: OperatorSource, options: CheckOptions, draw: DrawJudgedCalls, against: Sequence[str], seconds: float
) -> list[TimedCall]:
    found: list[TimedCall] = []
    with two_processes() as (folder, judge, kernel):
        kernel.result(LoadCandidate(source, options.libraries), CandidateLoaded)
        end = time.monotonic() + seconds
        for number in range(_MOST_ROUNDS):
            if number > _LEAST_ROUNDS and time.monotonic() > end:
                break
            seeded = replace(draw, folder=folder, options=replace(options, seed=options.seed + number))
            calls = judge.result(seeded, JudgedCalls).calls
            try:
                limit = float(options.timeout * len(calls))
                made = kernel.result(MakeCalls(draw.operator, calls, folder, timed=True), CallsMade, timeout=limit)
            except (ChildEndedError, TimeoutError) as error:
                raise _not_timed(draw, how_it_ended(error)) from error
            for which, why in made.refused.items():
                hint = f"Give calls that it takes: its schema is {draw.schema}."
                raise _not_timed(draw, f"The kernel refuses {calls[int(which)]['label']}: {why}.", hint)
            clock = _clock(options.device)
            judged = judge.result(JudgeAnswers((), tuple(against)), Judged)
            for finding in judged.findings:
                raise _not_timed(draw, finding.message, finding.hint)
            if number == 0:  # compilers and allocators warm up
                found = [TimedCall(draw.operator, each.sizes, each.dtype, each.moved_bytes) for each in judged.timed]
                continue
            for each, own, others in zip(found, made.milliseconds, judged.timed, strict=True):
                for name, milliseconds in {CANDIDATE: own, **others.milliseconds}.items():
                    each.milliseconds.setdefault(name, []).append(milliseconds)
                each.clocks.append(clock)
    return found


def _not_timed(draw: DrawJudgedCalls, why: str, hint: str | None = None) -> WrongResultError:
    hint = hint or "`exportkit ops check` of the library names the call."
    return WrongResultError(f"{draw.operator} is not timed. {why}", hint=hint)


def _clock(device: str) -> float:
    """Returns the clock of the device in MHz; 0 where it is not known."""
    if device.startswith("cuda"):
        command = [
            "nvidia-smi",
            f"--id={device.partition(':')[2] or 0}",
            "--query-gpu=clocks.sm",
            "--format=csv,noheader,nounits",
        ]
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout)
        return 0.0
    with contextlib.suppress(OSError):
        clocks = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return max(map(float, clocks), default=0.0)
    return 0.0
