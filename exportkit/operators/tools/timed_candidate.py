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
        UsageError: An operator has no calls.
        WrongResultError: The kernel refuses a call, its process ends, or an answer differs from the reference's.
    """
    for operator, reference in options.references.items():
        calls = given_for(operator, options.calls)
        if calls is None:
            hint = f"Give the sizes that matter: --calls {operator}=FILE.py:FUNCTION."
            raise UsageError(f"there are no calls of {operator} to time", hint=hint)
        progress(f"timing {operator}")
        yield from _timed_operator(
            source, options, DrawJudgedCalls(operator, "", reference, calls, options, ""), against, seconds
        )


def _timed_operator(
    source: OperatorSource, options: CheckOptions, draw: DrawJudgedCalls, against: Sequence[str], seconds: float
) -> list[TimedCall]:
    found: list[TimedCall] = []
    with two_processes() as (folder, judge, kernel):
        loaded = kernel.result(LoadCandidate(source, options.libraries, (draw.operator,)), CandidateLoaded)
        draw = replace(draw, schema=loaded.schemas[draw.operator], folder=folder, drawn=False)
        end = time.monotonic() + seconds
        for number in range(_MOST_ROUNDS):
            if number > _LEAST_ROUNDS and time.monotonic() > end:
                break
            seeded = replace(draw, options=replace(options, seed=options.seed + number))
            calls = judge.result(seeded, JudgedCalls).calls
            try:
                limit = float(options.timeout * len(calls))
                made = kernel.result(MakeCalls(draw.operator, calls, folder, timed=True), CallsMade, timeout=limit)
            except (ChildEndedError, TimeoutError) as error:
                raise _not_timed(draw.operator, how_it_ended(error)) from error
            clock = _clock(options.device)
            judged = judge.result(JudgeAnswers((), tuple(against)), Judged)
            _check(draw.operator, made, judged)
            if number == 0:  # compilers and allocators warm up
                found = [TimedCall(draw.operator, each.sizes, each.dtype, each.moved_bytes) for each in judged.timed]
                continue
            for each, own, others in zip(found, made.milliseconds, judged.timed, strict=True):
                for name, milliseconds in {CANDIDATE: own, **others.milliseconds}.items():
                    each.milliseconds.setdefault(name, []).append(milliseconds)
                each.clocks.append(clock)
    return found


def _check(operator: str, made: CallsMade, judged: Judged) -> None:
    wrong = [finding.message for finding in judged.findings] + [
        f"It refuses a call: {why}." for why in made.refused.values()
    ]
    if wrong:
        raise _not_timed(operator, wrong[0])


def _not_timed(operator: str, why: str) -> WrongResultError:
    return WrongResultError(
        f"{operator} is not timed. {why}", hint="`exportkit ops check` of the library names the call."
    )


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
