"""Records cases: sequences of eager's calls with what it answered, and with what it should have answered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from safetensors.torch import save

from exportkit.errors import UsageError
from exportkit.export.export_options import TraceOptions
from exportkit.export.record.cases import MAX_CASE_BYTES, case_sizes
from exportkit.export.record.eager_methods import DescribedModel
from exportkit.export.record.eager_run import EagerRun, run_eagerly
from exportkit.export.record.numerical_stability import eager_moves
from exportkit.export.record.outlier_errors import with_outlier_errors
from exportkit.export.record.reference import References
from exportkit.export.record.sequences import DrawnCall, draw_calls, session_call, with_state
from exportkit.package.case_files import EDGE_CASE, MOVES, named_results, named_tensors
from exportkit.package.manifest import Accuracy, CaseCall, Node, PackagedMethod
from exportkit.progress import Progress
from exportkit.sizes import label_of

MAX_CASES_BYTES = 4_000_000
"""All cases of a package take at most so much, unless the example inputs are larger."""

MAX_EDGE_CASE_BYTES = 400_000
"""So much of that is left for the cases with edge values."""

_SHRINKS = 4  # how often smaller sizes are tried for that

_FAR = (
    "numerically unstable: {}. A wider dtype gives other answers, in more than half of the digits. Compiled code may "
    "differ from eager as much as eager does when it rounds differently; set a Tolerance in the spec for another limit"
)


@dataclass(frozen=True)
class RecordedCase:
    """A sequence of calls: its tensors as a safetensors file, and the rest as in the manifest.

    `structures` has the structure of each result of eager, if this case was recorded now. `edge_case` says what makes
    its inputs edge values, such as "ties in x"; it is empty for inputs that were only drawn. `far` names the results
    that are too far from what a wide dtype gives to have a reference.
    """

    calls: tuple[CaseCall, ...]
    tensors: bytes
    reference_dtype: Literal["float64", "float32"] | None
    state_accuracy: Mapping[str, Accuracy | None]
    structures: tuple[Node, ...] = ()
    edge_case: str = ""
    far: tuple[str, ...] = ()


def record_cases(
    model: DescribedModel, examples: Mapping[str, Mapping[str, int]], options: TraceOptions, progress: Progress
) -> tuple[RecordedCase, ...]:
    """Draws calls and records what eager answers: single calls of each method without state, and sessions."""
    plans: list[Callable[[int], list[list[DrawnCall]]]] = [
        functools.partial(_planned, model, method, examples[method.name], options)
        for method in model.methods
        if not method.state
    ]
    if stateful := with_state(model.methods):
        example = {name: size for method in reversed(stateful) for name, size in examples[method.name].items()}
        plans.append(functools.partial(_planned, model, stateful[0], example, options))
    cases: list[RecordedCase] = []
    told: set[str] = set()
    for plan in plans:
        limit = MAX_CASE_BYTES
        for _ in range(_SHRINKS):
            found: list[RecordedCase] = []
            largest, its_run = 0, None  # only one is kept: it has the state in a wide dtype
            for number, calls in enumerate(plan(limit)):
                progress(f"recording case {len(cases) + number + 1}")
                eager_run = run_eagerly(model, calls)
                found.append(record_run(eager_run))
                if its_run is None or len(found[number].tensors) > len(found[largest].tensors):
                    largest, its_run = number, eager_run
                if far := [name for name in found[-1].far if name not in told]:
                    progress(_FAR.format(" and ".join(f"`{name}`" for name in far)))
                    told.update(far)
            # The first two are the example's and the smallest, whatever they take.
            fixed, others = (sum(len(case.tensors) for case in part) for part in (found[:2], found[2:]))
            budget = max((MAX_CASES_BYTES - MAX_EDGE_CASE_BYTES) // len(plans) - fixed, MAX_CASES_BYTES // 10)
            if others <= budget:
                break
            limit = int(limit * 0.8 * budget / others)
            progress(f"the cases take {others:,} bytes of the {budget:,} that they may: smaller ones are drawn")
        if its_run is not None:
            found[largest] = record_run(its_run, outliers=True)
        cases += found
    return tuple(cases)


def _planned(
    model: DescribedModel, method: PackagedMethod, example: Mapping[str, int], options: TraceOptions, max_bytes: int
) -> list[list[DrawnCall]]:
    """Draws single calls of a method, or sessions if it has state."""
    call = session_call(model.methods) if method.state else method.call
    sessions = []
    for number, sizes in enumerate(case_sizes(call, example, options.cases, options.seed, max_bytes=max_bytes)):
        calls = draw_calls(model, method, sizes, options.seed + number)
        size = sum(tensor.nbytes for call in calls for tensor in call.bound.tensors)
        if method.state and size > 4 * MAX_CASE_BYTES:
            raise UsageError(
                f"the inputs of a session at {label_of(sizes)} take {size:,} bytes, too many for a recorded case",
                hint="Let draw_sequence return fewer or smaller calls, or give smaller example inputs.",
            )
        sessions.append(calls)
    return sessions


def record_run(eager_run: EagerRun, *, edge_case: str = "", outliers: bool = False) -> RecordedCase:
    """Packs inputs and results of a session, with references.

    `outliers`: whether errors that few elements have count as in several runs. One case of a package does for all.
    """
    found = eager_run.references()
    if outliers:
        found = with_outlier_errors(found, eager_run)
    recorded = {each.name for each in eager_run.state}
    tensors: dict[str, torch.Tensor] = {}
    for number, answered in enumerate(eager_run.answered):
        tensors |= named_tensors(f"{number}.input", answered.bound.tensors)
        tensors |= named_tensors(f"{number}.output", answered.outputs)
    for keys, part in zip(eager_run.keys(), eager_run.parts):
        own = recorded if part is eager_run.after else {name for name in part.eager if name.startswith("written.")}
        tensors |= named_results(keys, {name: tensor for name, tensor in part.eager.items() if name in own})
    for keys, reference in zip(eager_run.keys(reference=True), found):
        tensors |= named_results(keys, reference.outputs if reference else {})
    moves = {} if edge_case else eager_moves(eager_run, found)
    metadata = {EDGE_CASE: edge_case, MOVES: msgspec.json.encode(moves).decode() if moves else ""}
    return RecordedCase(
        calls=tuple(
            CaseCall(method=c.method, sizes=dict(c.sizes), accuracy=dict(r.accuracy) if r else {})
            for c, r in zip(eager_run.calls, found)
        ),
        tensors=save(tensors, metadata={key: text for key, text in metadata.items() if text} or None),
        reference_dtype=next((each.dtype for each in found if each), None),
        state_accuracy=dict(found[-1].accuracy) if found[-1] else {},
        structures=eager_run.structures,
        edge_case=edge_case,
        far=_far(eager_run, found),
    )


def _far(eager_run: EagerRun, found: Sequence[References | None]) -> tuple[str, ...]:
    """Returns the results that were computed in a wide dtype, and have no reference all the same."""
    parts = zip(eager_run.parts, found)
    names = [name for part, has in parts for name in part.wanted if has is None or name not in has.outputs]
    return tuple(dict.fromkeys(names)) if names and eager_run.wide is not None else ()
