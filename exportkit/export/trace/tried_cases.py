"""Records cases of the sizes at which a traced program was tried, so that they are tried for ever."""

from __future__ import annotations

from collections.abc import Sequence

from exportkit.errors import ExportError
from exportkit.export.record.cases import MAX_CASE_BYTES
from exportkit.export.record.eager_methods import DescribedModel
from exportkit.export.record.eager_run import run_eagerly
from exportkit.export.record.record import MAX_CASES_BYTES, RecordedCase, record_run
from exportkit.export.record.sequences import draw_calls
from exportkit.export.trace.trace_method import TracedTask
from exportkit.progress import Progress
from exportkit.sizes import input_bytes, label_of

_CASES = 4  # so many for each method


def tried_cases(
    model: DescribedModel, traced: Sequence[TracedTask], seed: int, progress: Progress
) -> tuple[RecordedCase, ...]:
    """Records cases of the sizes at which programs were tried, as far as they are small."""
    examples = {name: size for each in traced for name, size in each.sizes.example.items()}
    cases: list[RecordedCase] = []
    for each in traced:
        method = each.method.packaged
        fitting = [sizes for sizes in each.tried if input_bytes(method.call, sizes) <= MAX_CASE_BYTES]
        for number, sizes in enumerate(fitting[:_CASES]):
            progress(f"recording a case at {label_of(sizes)}")
            drawn = draw_calls(model, method, {**examples, **sizes} if method.state else sizes, seed + number)
            try:
                case = record_run(run_eagerly(model, drawn))
            except ExportError:
                continue  # a session of these sizes that eager refuses
            if len(case.tensors) <= MAX_CASES_BYTES // 8:
                cases.append(case)
    return tuple(cases)
