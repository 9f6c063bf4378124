"""Tensors that do not lie in memory as a kernel may expect."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from exportkit.contract.check_fakes import steps
from exportkit.contract.definition import Problem, of_call
from exportkit.contract.differences import first_difference
from exportkit.contract.fake_kernel import fake_answer
from exportkit.contract.findings import Severity
from exportkit.contract.memory_layouts import EXPANDED, STRIDED, MemoryLayout
from exportkit.contract.operator_spec import DEFAULT_TOLERANCES, Sample
from exportkit.contract.trial import NotApplicable, Trial, arguments, copied, first_line, tensors, with_tensors


def _laid_out(trial: Trial, call: Sample) -> Iterator[tuple[MemoryLayout, Sample]]:
    """Yields the call in each layout that changes it."""
    own = copied(call)
    for layout in STRIDED:
        if layout is EXPANDED and trial.subject.is_mutable:
            continue  # elements that share memory cannot be written to
        laid = with_tensors(own, layout.apply)
        if any(a is not b for a, b in zip(arguments(laid), arguments(own))):
            yield layout, laid


@of_call(
    "strides",
    "Read each tensor by its strides and its offset, or call contiguous() on it first. Or refuse what is not contiguous.",
    order=40,
    dtypes="first",
    unless=("determinism", "mutation", "aliasing"),
)
def strides(trial: Trial, call: Sample) -> Problem | None:
    """The answer depends on values, not on where they lie. An operator may refuse strides, unless its SPEC says more."""
    trial.answer(call)
    refusals = []
    for layout, laid in _laid_out(trial, call):
        # Expanding changes values, the other layouts do not.
        plain = with_tensors(laid, Tensor.contiguous)
        expected = trial.fresh_answer(plain) if layout is EXPANDED else trial.answer(call)
        try:
            actual = trial.used_up(laid)
        except Exception as error:
            if trial.subject.spec is not None:
                return Problem(f"The operator refuses tensors with {layout.name}: {first_line(error)}.", layout=layout)
            refusals.append(first_line(error))
            continue
        if problem := _judged(trial, layout, actual, expected):
            return problem
    if refusals and len(refusals) == len(STRIDED):
        raise NotApplicable(f"the operator refuses strides: {refusals[0]}")
    return None


def _judged(trial: Trial, layout: MemoryLayout, actual: list[Tensor], expected: list[Tensor]) -> Problem | None:
    if found := first_difference(actual, expected):
        index, text = found
        rtol, atol = DEFAULT_TOLERANCES.get(expected[index].dtype, (0.0, 0.0))
        close = trial.subject.spec is None and first_difference(actual, expected, rtol, atol) is None
        return Problem(
            f"The same values must have the same answer, but where the tensors have {layout.name}, in output {index} {text}.",
            severity=Severity.doubtful if close else Severity.broken,
            layout=layout,
        )
    if trial.subject.spec is not None and not trial.subject.is_mutable:
        for index, output in enumerate(actual):
            if not output.is_contiguous():
                return Problem(
                    f"Output {index} must be contiguous, its strides are {list(output.stride())}.", layout=layout
                )
    return None


@of_call(
    "fake-layouts",
    "Make the fake kernel return the strides that the kernel returns: `torch.empty_like` keeps the strides of its "
    "argument, `new_empty` makes a contiguous tensor.",
    order=22,
    dtypes="first",
    most=6,
    unless=("aliasing", "mutation", "fake-runs", "fake-shape", "fake-strides", "fake-dtype", "fake-device"),
)
def fake_layouts(trial: Trial, call: Sample) -> Problem | None:
    """The fake knows the outputs of inputs with any strides."""
    trial.answer(call)
    for layout, laid in _laid_out(trial, call):
        try:
            real = tensors(trial.run(laid, trial.subject.overload))
        except Exception:
            continue  # it may refuse strides
        try:
            fake = fake_answer(trial, laid)
        except Exception as error:
            refusal = first_line(error)
            return Problem(
                f"The kernel takes tensors with {layout.name}, the fake refuses it: {refusal}.", layout=layout
            )
        for index, (f, r) in enumerate(zip(fake, real)):
            said, returned = ((list(t.shape), steps(t), t.dtype) for t in (f, r))
            if said != returned:
                return Problem(
                    f"Where the tensors have {layout.name}, the fake kernel says that output {index} has strides "
                    f"{list(f.stride())} and {f.dtype}, the kernel returns {list(r.stride())} and {r.dtype}.",
                    layout=layout,
                )
    return None
