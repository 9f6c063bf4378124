"""The process of a kernel that a program wrote: it has the kernel, and not the reference."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from exportkit.child.messages import serve
from exportkit.export.models.resolve import load_operator_libraries
from exportkit.libraries import mapped_beside_torch
from exportkit.operators.contract.operator_trial import Subject, Trial, first_line
from exportkit.operators.tools.call_files import read_calls, write_answers
from exportkit.operators.tools.candidate import CallsMade, CandidateLoaded, LoadCandidate, MakeCalls
from exportkit.operators.tools.checking import chosen
from exportkit.operators.tools.cold_timer import ColdTimer
from exportkit.operators.tools.list_worker import registers_operators
from exportkit.operators.tools.registered import has_schema, newly_registered, overload
from exportkit.operators.tools.source import load


def dispatched_by(run: torch.autograd.profiler.profile) -> set[str]:
    """Returns the operators that torch's dispatcher was asked for while a profiler ran, also by C++."""
    return {event.name for event in run.function_events if "::" in event.name}


def load_candidate(command: LoadCandidate) -> CandidateLoaded:
    """Loads the operators."""
    with newly_registered() as registered:
        load_operator_libraries([Path(each) if Path(each).is_file() else each for each in command.libraries])
        load(command.source)
        names = chosen([name for name in registered() if has_schema(name)], command.operators)
    files = [path for path in mapped_beside_torch() if registers_operators(path)]
    if command.source.kind == "module" and (script := Path(command.source.text)).is_file():
        files.append(script.resolve())
    return CandidateLoaded(tuple(map(str, files)), {name: str(overload(name)._schema) for name in names})


def make_calls(command: MakeCalls) -> CallsMade:
    """Makes the calls, and writes down what the kernel answers, and what it calls or how long it takes."""
    operator = overload(command.operator)
    trial, folder = Trial(Subject(operator, ())), Path(command.folder)
    answers: dict[int, list[Tensor]] = {}
    refused: dict[str, str] = {}
    milliseconds: list[float] = []
    calls = read_calls(folder / "calls.safetensors", command.calls)
    timer = ColdTimer(calls[0].device) if command.timed and calls else None
    with torch.no_grad(), torch.autograd.profiler.profile(enabled=timer is None) as log:
        for number, call in enumerate(calls):
            try:
                if timer is None:
                    answers[number] = trial.used_up(call)
                else:
                    result, took = timer.time(partial(trial.run, call), call.tensors)
                    answers[number] = trial.produced(call, result)
                    milliseconds.append(took)
            except Exception as error:
                refused[str(number)] = first_line(error)
    write_answers(folder / "answers.safetensors", answers)
    if timer is not None:
        return CallsMade(refused, milliseconds=tuple(milliseconds))
    own = operator._schema.name
    return CallsMade(refused, tuple(sorted(dispatched_by(log) - {own, command.operator})))


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    serve(connection, {LoadCandidate: load_candidate, MakeCalls: make_calls})
