"""Records cases of the sizes at which a traced program was tried, so that they are tried for ever."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exportkit.errors import ExportError
from exportkit.export.export_options import TraceOptions
from exportkit.export.record.cases import MAX_CASE_BYTES
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.record.record import MAX_CASES_BYTES, RecordedCase, record_case
from exportkit.export.record.sequences import calls_on, draw_calls
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
) -> tuple[RecordedCase, ...]:
    """Records cases of the sizes at which programs were tried, as far as they are small.

    Args:
        eager: The model, which is on `device`.
        traced: The traced methods.
        state: The description of the state.
        options: The seed of the cases, and whether eager may use TF32.
        device: The model's device.
        progress: Called with a description of each case.
    """
    methods = [each.method.packaged for each in traced]
    examples = {name: size for each in traced for name, size in each.sizes.example.items()}
    cases: list[RecordedCase] = []
    for each in traced:
        method = each.method.packaged
        fitting = [sizes for sizes in each.tried if input_bytes(method.call, sizes) <= MAX_CASE_BYTES]
        for number, sizes in enumerate(fitting[:_CASES]):
            progress(f"recording a case at {label_of(sizes)}")
            drawn = draw_calls(
                eager, methods, method, {**examples, **sizes} if method.state else sizes, options.seed + number
            )
            try:
                case = record_case(eager, methods, state, calls_on(device, drawn), tf32=options.tf32)
            except ExportError:
                continue  # a session of these sizes that eager refuses
            if len(case.tensors) <= MAX_CASES_BYTES // 8:
                cases.append(case)
    return tuple(cases)
