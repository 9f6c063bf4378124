"""The judge of a kernel that a program wrote: it has the reference, and not the kernel."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exportkit.child.messages import serve
from exportkit.errors import UsageError
from exportkit.export.models.placement import usable_device
from exportkit.export.models.resolve import parse_dtype, resolve_decompositions
from exportkit.operators.contract.differences import first_difference
from exportkit.operators.contract.findings import Finding, Severity
from exportkit.operators.contract.operator_spec import default_tolerance
from exportkit.operators.contract.operator_trial import Subject, Trial, first_line
from exportkit.operators.contract.sample import Sample, tensors, upcast
from exportkit.operators.tools.call_files import read_answers, write_calls
from exportkit.operators.tools.candidate import (
    DrawJudgedCalls,
    JudgeAnswers,
    Judged,
    JudgedCalls,
    ReferenceTimes,
    parameters_of,
)
from exportkit.operators.tools.candidate_worker import dispatched_by
from exportkit.operators.tools.check_worker import calls_of_function
from exportkit.operators.tools.checking import CheckOptions
from exportkit.operators.tools.cold_timer import ColdTimer
from exportkit.operators.tools.collected_calls import Collector
from exportkit.operators.tools.journal import Journal
from exportkit.operators.tools.registered import has_schema, overload

_MEMORY = re.compile(
    "(new_)?(empty|zeros|full)(_like|_strided)?|zero_|fill_|copy_|clone|contiguous|to|_to_copy|resize_|lift_fresh|alias|"
    "detach|as_strided|(_unsafe_)?view|_?reshape(_alias)?|flatten|unflatten|expand(_as)?|permute|transpose|t|movedim|"
    "select|slice|narrow|(un)?squeeze|unbind|split|chunk|item|_local_scalar_dense|result_type"
)
"""What a kernel may ask torch for: memory, views and copies of it."""


class _Refused(Exception):
    """The reference refuses a call that the kernel takes. The message says so."""


class _Judge:
    """A reference, in the place of the kernel."""

    def __init__(self) -> None:
        self._folder = Path()
        self._calls: list[Sample] = []
        self._trial: Trial | None = None
        self._library: torch.library.Library | None = None
        self._reference: Callable[..., Any] | None = None
        self._given: Callable[..., Any] | None = None
        self._compiled: Callable[..., Any] | None = None

    def draw(self, command: DrawJudgedCalls) -> JudgedCalls:
        """Draws calls that the reference takes, and writes them to the folder."""
        options = command.options
        self._folder = Path(command.folder)
        if self._trial is None:
            self._define(command)
        device = usable_device("cpu" if options.device == "auto" else options.device, "")
        self._calls, why_none = self._drawn(command.operator, options, device) if command.drawn else ([], "")
        if command.calls and self._given is not None:
            torch.manual_seed(options.seed)
            given = calls_of_function(command.calls, self._given)
            self._calls += given if command.drawn else [each.with_tensors(lambda t: t.to(device)) for each in given]
        return JudgedCalls(write_calls(self._folder / "calls.safetensors", self._calls), why_none)

    def _drawn(self, name: str, options: CheckOptions, device: torch.device) -> tuple[list[Sample], str]:
        dtypes = tuple(map(parse_dtype, options.dtypes))
        journal = Journal(self._folder / "journal", options.timeout)
        collector = Collector("drawn", overload(name), journal, [device], dtypes, (), options.seed, options.most_calls)
        collector.drawn()
        journal.rest()
        return collector.calls, collector.why_none

    def _define(self, command: DrawJudgedCalls) -> None:
        """Registers the reference as the operator's kernel."""
        name = command.operator
        functions = {"reference": command.reference} | ({"calls": command.calls} if command.calls else {})
        found = resolve_decompositions(functions)
        if has_schema(name):
            said = f"the reference {command.reference} loads {name}, the operator that it is to judge"
            raise UsageError(said, hint="Write the reference in a module of its own, in torch's operators.")
        namespace, _, rest = name.partition("::")
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._library.define(command.schema.removeprefix(f"{namespace}::"))
        self._library.impl(rest, found["reference"], "CompositeExplicitAutograd")
        self._reference, self._given = found["reference"], found.get("calls")
        self._trial = Trial(Subject(overload(name), ()))

    def judge(self, command: JudgeAnswers) -> Judged:
        """Compares the kernel's answers with those of the reference, in the same dtype or in float64."""
        assert self._trial is not None
        try:
            read = read_answers(self._folder / "answers.safetensors")
            answers = {number: read[number] for number in range(len(self._calls)) if number in read}
        except Exception as error:  # the kernel's process wrote the file
            message = f"The answers of the kernel's process cannot be read: {first_line(error)}."
            hint = "The file is written by exportkit in the kernel's process: the kernel must have changed it."
            return Judged((Finding("judged-values", Severity.broken, message, hint=hint),), 0)
        with torch.no_grad(), torch.autograd.profiler.profile() as log:
            try:
                expected = {number: self._expected(self._calls[number]) for number in answers}
            except _Refused as refused:
                hint = parameters_of(str(self._trial.subject.overload._schema))
                return Judged((Finding("judged-values", Severity.broken, str(refused), hint=hint),), 0)
        findings: list[Finding] = []
        for number, answer in answers.items():
            differences = [first_difference(answer, each, default_tolerance) for each in expected[number]]
            if all(differences):  # it is near neither
                message = f"An answer of the kernel's process must equal the reference's, but {differences[0]}."
                findings.append(Finding("judged-values", Severity.broken, message, hint=self._calls[number].label))
                break
        of_reference = {each for each in dispatched_by(log) if not _MEMORY.fullmatch(each.partition("::")[2])}
        if same := sorted(of_reference & {*command.dispatched}):
            message = f"The kernel calls what the reference computes with: {', '.join(same[:4])}."
            findings.append(Finding("judged-calls", Severity.broken, message, hint="Compute the result in the kernel."))
        timed = self._timed(command.against) if command.against and not findings else ()
        return Judged(tuple(findings), len(answers), timed)

    def _timed(self, against: Sequence[str]) -> tuple[ReferenceTimes, ...]:
        """Times the reference in each call."""
        assert self._trial is not None
        if self._compiled is None and "compile" in against:
            torch._dynamo.config.recompile_limit = 1_000  # each size is compiled for itself
            self._compiled = torch.compile(self._reference, dynamic=False)
        ways = {"eager": self._reference, "compile": self._compiled}
        timer = ColdTimer(self._calls[0].device)
        found = []
        for call in self._calls:
            milliseconds = {}
            for name in against:
                own = call.copied()
                try:
                    with torch.no_grad():
                        result, milliseconds[name] = timer.time(partial(self._trial.run, own, ways[name]), own.tensors)
                except Exception as error:  # in eager it ran before
                    said = f"torch.compile does not take the reference: {first_line(error)}"
                    raise UsageError(said, hint="Time it without: --against eager.") from error
            both = [*call.tensors, *tensors(result)]
            moved = sum(tensor.nbytes for tensor in both)
            dtype = str(call.floating_dtype or both[0].dtype).removeprefix("torch.")
            sizes = ", ".join("x".join(map(str, tensor.shape)) or "1" for tensor in call.tensors or both)
            found.append(ReferenceTimes(sizes, dtype, moved, milliseconds))
        return tuple(found)

    def _expected(self, call: Sample) -> tuple[list[Tensor], list[Tensor]]:
        """Returns what the reference answers in the call's dtypes, and in float64."""
        assert self._trial is not None
        try:
            same = [each.cpu() for each in self._trial.fresh_answer(call, self._reference)]
        except Exception as error:
            raise _Refused(f"The reference refuses {call.label}: {first_line(error)}.") from error
        try:
            exact = [each.cpu() for each in self._trial.fresh_answer(upcast(call), self._reference)]
        except Exception:  # it may take no float64
            return same, same
        return same, [e.to(s.dtype) for e, s in zip(exact, same)]


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    judge = _Judge()
    serve(connection, {DrawJudgedCalls: judge.draw, JudgeAnswers: judge.judge})
