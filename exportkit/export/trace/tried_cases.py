"""Tries a traced program at sizes at which conditions fail that it was traced under."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exportkit.errors import ExportError
from exportkit.export.export_options import TraceOptions
from exportkit.export.record.cases import MAX_CASE_BYTES
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.record.record import MAX_CASES_BYTES, RecordedCase, record_case
from exportkit.export.record.sequences import calls_on, draw_calls
from exportkit.export.trace.explain import explain_refusal
from exportkit.export.trace.program_check import check_programs
from exportkit.export.trace.trace_method import TracedTask
from exportkit.package.manifest import StateTensor
from exportkit.progress import Progress
from exportkit.sizes import input_bytes, label_of

_CASES = 4  # so many for each method


def tried_cases(
    eager: EagerMethods,
    traced: Sequence[TracedTask],
    state: Sequence[StateTensor],
    options: TraceOptions,
    device: torch.device,
    progress: Progress,
    *,
    values: bool,
) -> tuple[RecordedCase, ...]:
    """Records cases of the sizes at which programs must be tried, and holds them against the cases.

    Args:
        eager: The model, which is on `device`.
        traced: The traced methods.
        state: The description of the state.
        options: The seed of the cases, and whether eager may use TF32.
        device: The model's device.
        progress: Called with a description of each case.
        values: Whether values are compared, or only sizes.

    Raises:
        ExportError: A program is wrong there, so that torch was right. The message is that of the refusal.
    """
    methods = [each.method.packaged for each in traced]
    examples = {name: size for each in traced for name, size in each.sizes.example.items()}
    cases: list[RecordedCase] = []
    for each in traced:
        method = each.method.packaged
        candidates = [(trial, sizes) for trial in each.trials for sizes in trial.sizes]
        fitting = [each for each in candidates if input_bytes(method.call, each[1]) <= MAX_CASE_BYTES] or candidates[:1]
        for number, (trial, sizes) in enumerate(fitting[:_CASES]):
            progress(f"trying {label_of(sizes)}")
            try:
                seed = options.seed + number
                drawn = draw_calls(eager, methods, method, {**examples, **sizes} if method.state else sizes, seed)
                case = record_case(eager, methods, state, calls_on(device, drawn), tf32=options.tf32)
            except ExportError as error:
                if not trial.legal:
                    continue  # what no call may have is no reason to refuse the rest
                raise explain_refusal(trial.refused, each.task, strict=True) from error
            try:
                check_programs(eager, traced, state, [case], values=values, tf32=options.tf32)
            except ExportError as error:
                raise explain_refusal(trial.refused, each.task, strict=True) from error
            if len(case.tensors) <= MAX_CASES_BYTES // 8:
                cases.append(case)
    return tuple(cases)
