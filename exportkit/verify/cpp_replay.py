"""Replays the recorded cases in C++: exportkit-run, a process without Python, makes the calls and judges them."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from exportkit.errors import HostError
from exportkit.package.archive import PackageReader
from exportkit.package.case_files import (
    edge_case_of,
    explains,
    moves_of,
    result_keys,
    results_in,
    results_of,
    state_keys,
)
from exportkit.package.manifest import Accuracy, PackagedMethod
from exportkit.sizes import case_label, case_sizes, shape_at, state_sizes
from exportkit.verify.comparisons import OutputComparison, OutputError
from exportkit.verify.filled_memory import CONTENTS, MALLOC_BYTES, Content
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import CallFailed, Crashed, LoadFailed, TimedOut, Verdict
from exportkit.verify.replayer import ReplayTask
from exportkit.verify.report import Check
from exportkit.verify.value_verdicts import judged
from exportkit.verify.verify_worker import LOAD_TIMEOUT

PROGRAM = Path(__file__).parents[1] / "bin" / "exportkit-run"
_DOING = "replaying the cases in exportkit-run"

Number = float | str | None  # infinities and NaN are text


class _Error(msgspec.Struct, frozen=True):
    rms: Number
    rms_allowed: Number
    greatest: Number
    greatest_allowed: Number


class _Output(msgspec.Struct, frozen=True):
    name: str
    compared: int
    mismatched: int
    max_abs: Number
    max_rel: Number
    rtol: float
    atol: float
    error: _Error | None
    note: str | None


class _Call(msgspec.Struct, frozen=True):
    problem: str | None
    outputs: tuple[_Output, ...]


class _Case(msgspec.Struct, frozen=True):
    ok: bool
    seconds: float
    calls: tuple[_Call, ...]
    state: tuple[_Output, ...]


class _Document(msgspec.Struct, frozen=True):
    device: str
    torch: str
    seconds: float
    cases: tuple[_Case, ...]


class _Refusal(msgspec.Struct, frozen=True):
    kind: str
    message: str
    hint: str | None = None


class _Refused(msgspec.Struct, frozen=True):
    error: _Refusal


class CppReplay(msgspec.Struct, frozen=True):
    """What exportkit-run said: the device, the version of torch, the seconds of loading, and its checks."""

    device: str
    version: str
    seconds: float
    checks: tuple[Check, ...]


def replay_in_cpp(
    artifact: Path, reader: PackageReader, options: VerifyOptions, *, target: str, device: str
) -> CppReplay | Verdict:
    """Replays the recorded cases of a target in C++, or returns the verdict if it cannot be loaded."""
    if not PROGRAM.exists():
        return LoadFailed.of(
            HostError(
                f"there is no {PROGRAM.name} here", hint="`make build` builds it, for the torch that is installed."
            )
        )
    command = [str(PROGRAM), str(artifact.absolute()), "--json", "--target", target, "--device", device]
    for key in options.trust.keys:
        command += ["--public-key", str(Path(key).absolute())]
    if options.trust.signature is not None:
        command += ["--signature", str(options.trust.signature.absolute())]
    for content in CONTENTS:
        found = _replayed(command, reader, options, target, content)
        if not isinstance(found, CppReplay) or any(check.failed for check in found.checks):
            break
    return found


def _replayed(
    command: Sequence[str], reader: PackageReader, options: VerifyOptions, target: str, content: Content
) -> CppReplay | Verdict:
    """Runs it once, in memory with this content."""
    # It has one limit for loading and all calls.
    timeout = max(options.timeout, LOAD_TIMEOUT)
    environment = {**os.environ, "MALLOC_PERTURB_": str(MALLOC_BYTES[content])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return TimedOut(timeout, _DOING)
    if done.returncode < 0:
        return Crashed(-done.returncode, None, _DOING, done.stderr[-2000:])
    try:
        document = msgspec.json.decode(done.stdout, type=_Document)
    except msgspec.DecodeError:
        return _refused(done.stdout, done.stderr, done.returncode)
    wanted = options.cases or range(len(document.cases))
    checks = tuple(check for number, check in enumerate(_checks(reader, document, target)) if number in wanted)
    return CppReplay(document.device, document.torch, document.seconds, checks)


def _refused(said: str, printed: str, code: int) -> LoadFailed:
    try:
        error = msgspec.json.decode(said, type=_Refused).error
    except msgspec.DecodeError:
        return LoadFailed(PROGRAM.name, printed.strip() or said, code or 3)
    return LoadFailed(error.kind, error.message + (f"\n  {error.hint}" if error.hint else ""), code or 3)


def _checks(reader: PackageReader, document: _Document, target: str) -> Iterator[Check]:
    for index, (case, found) in enumerate(zip(reader.manifest.cases, document.cases)):
        content = reader.read(case.record)
        edge_case = edge_case_of(content)
        label = f"case {index} ({case_label(case, edge_case)})"
        task = ReplayTask(label, case, reader.path, moves=moves_of(content))
        verdict = _verdict(reader, task, found)
        counts = (0, len(found.calls)) if edge_case else (len(found.calls), 0)
        yield Check("cases", task.label, case_sizes(case), verdict, found.seconds, target, *counts)


def _verdict(reader: PackageReader, task: ReplayTask, found: _Case) -> Verdict:
    case, manifest = task.case, reader.manifest
    results: list[OutputComparison] = []
    for number, call in enumerate(found.calls):
        if call.problem is not None:
            return CallFailed("WrongResult", call.problem, task.call_name(number))
        method = manifest.method(case.calls[number].method)
        prefix = f"call {number}: " if len(case.calls) > 1 else ""
        described = _described(method, case.calls[number].sizes)
        moves = results_in(result_keys(number, method.call), task.moves)
        results += (_comparison(each, prefix, described, number, moves.get(each.name)) for each in call.outputs)
    if found.state:
        sizes = state_sizes(manifest, case)
        state = {each.name: (each.dtype, tuple(shape_at(each, sizes))) for each in manifest.state}
        moves = results_in(state_keys(manifest.state), task.moves)
        results += (_comparison(each, "state ", state, None, moves.get(each.name)) for each in found.state)
    return judged(results)


_Described = Mapping[str, tuple[str, tuple[int | None, ...]]]  # by result, its dtype and its shape


def _described(method: PackagedMethod, sizes: Mapping[str, int]) -> _Described:
    return {each.name: (each.dtype, tuple(shape_at(each, sizes))) for each in results_of(method.call)}


def _comparison(
    output: _Output, prefix: str, described: _Described, call: int | None, moves: Accuracy | None
) -> OutputComparison:
    dtype, shape = described[output.name]
    error = output.error
    away = Accuracy(rms=0.0, greatest=float(output.max_abs or 0))  # the mean is not known here
    if dtype.startswith(("int", "uint", "bool")):
        away = Accuracy(rms=math.sqrt(output.mismatched / max(output.compared, 1)), greatest=1.0)
    return OutputComparison(
        name=prefix + output.name,
        dtype=dtype,
        shape=tuple(-1 if size is None else size for size in shape),
        compared=output.compared,
        mismatched=output.mismatched,
        max_abs=_number(output.max_abs),
        max_abs_at=None,
        max_rel=_number(output.max_rel),
        max_rel_at=None,
        rtol=output.rtol,
        atol=output.atol,
        note=output.note,
        error=OutputError(
            rms=float(error.rms or 0),
            rms_allowed=float(error.rms_allowed or 0),
            greatest=float(error.greatest or 0),
            greatest_allowed=float(error.greatest_allowed or 0),
            greatest_at=None,
        )
        if error is not None
        else None,
        call=call,
        moves=moves if moves and explains(moves, away) else None,
    )


def _number(value: Number) -> float | None:
    return None if value is None else float(value)
