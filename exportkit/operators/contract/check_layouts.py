"""Tensors that do not lie in memory as a kernel may expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch._library.triton import triton_ops_to_kernels

from exportkit.operators.contract.check_fakes import depends_on_values, fake_outputs, steps
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import first_difference
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.memory_layouts import EXPANDED, SPACED, STRIDED, UNALIGNED, MemoryLayout
from exportkit.operators.contract.operator_spec import default_tolerance
from exportkit.operators.contract.operator_trial import NotApplicable, Trial, first_line
from exportkit.operators.contract.resizing import resized, sizes_of
from exportkit.operators.contract.sample import Sample, tensors

_LARGE = 4096
_SMALL = 40  # elements of a call that is tried at each offset from an aligned address


@dataclass(frozen=True)
class _LaidOut:
    """A call in a layout. `number` is the only tensor that has it; None: all have."""

    call: Sample
    layout: MemoryLayout
    number: int | None = None

    @property
    def where(self) -> str:
        who = "the tensors have" if self.number is None else f"tensor {self.number} alone has"
        return f"{who} {self.layout.name}"

    def problem(self, message: str, severity: Severity = Severity.broken) -> Problem:
        return Problem(message, severity=severity, layout=self.layout, number=self.number)


def _laid_out(trial: Trial, call: Sample, layouts: Sequence[MemoryLayout] = STRIDED) -> Iterator[_LaidOut]:
    """Yields the call in each layout that changes it, and with each tensor alone in another layout than the rest."""
    for layout in layouts:
        if layout is EXPANDED and trial.subject.is_mutable:
            continue  # elements that share memory cannot be written to
        own = call.copied()  # for each call, because the operator may write to its arguments
        laid = own.with_tensors(layout.apply)
        if any(a is not b for a, b in zip(laid.tensors, own.tensors)):
            yield _LaidOut(laid, layout)
    if len(call.tensors) > 1 and call.elements <= _LARGE:
        for number, tensor in enumerate(call.tensors):
            if tensor.dim():
                own = call.copied()
                yield _LaidOut(own.with_tensor(number, SPACED.apply(own.tensors[number])), SPACED, number)


@ContractCheck(
    "strides",
    "Read each tensor by its strides and its offset, or call contiguous() on it first. Or refuse what is not "
    "contiguous. A contiguous tensor may begin at any element, where aligned loads fail.",
    order=40,
    dtypes="first",
    unless=("determinism", "mutation", "aliasing"),
)
def strides(trial: Trial, call: Sample) -> Problem | None:
    """The answer depends on values, not on where they lie. An operator without a SPEC may refuse strides."""
    refusals, answered = [], False
    for laid in _laid_out(trial, call, (*STRIDED, *UNALIGNED) if call.elements <= _SMALL else STRIDED):
        # Expanding changes values, the other layouts do not.
        try:
            if laid.layout is EXPANDED:
                expected = trial.varied_answer(laid.call.with_tensors(Tensor.contiguous), "equal rows")
            else:
                expected = trial.answer(call)
        except NotApplicable:
            continue
        try:
            actual = trial.used_up(laid.call)
        except Exception as error:
            if trial.subject.spec is not None:
                return laid.problem(f"The operator refuses a call where {laid.where}: {first_line(error)}.")
            refusals.append(first_line(error))
            continue
        answered = True
        if problem := _judged(trial, laid, actual, expected):
            return problem
    if refusals and not answered:
        raise NotApplicable(f"the operator refuses strides: {refusals[0]}")
    return None


def _judged(trial: Trial, laid: _LaidOut, actual: list[Tensor], expected: list[Tensor]) -> Problem | None:
    has_spec = trial.subject.spec is not None
    if found := first_difference(actual, expected):
        close = first_difference(actual, expected, default_tolerance) is None
        if close and laid.layout in UNALIGNED and trial.subject.name in triton_ops_to_kernels:
            return None  # Triton compiles other code for a pointer that is no multiple of 16
        severity = Severity.doubtful if close and not has_spec else Severity.broken
        text = f"The same values must have the same answer, but where {laid.where}, {found}."
        return laid.problem(text, severity)
    if has_spec and not trial.subject.is_mutable:
        for index, output in enumerate(actual):
            if not output.is_contiguous():
                return laid.problem(
                    f"Output {index} must be contiguous, but where {laid.where}, strides are {list(output.stride())}."
                )
    return None


@ContractCheck(
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
    for laid in _laid_out(trial, call):
        try:
            real = tensors(trial.run(laid.call, trial.subject.overload))
        except Exception:  # it may refuse strides, with any class
            continue
        try:
            fake = fake_outputs(trial, laid.call)
        except Exception as error:
            refusal = first_line(error)
            return laid.problem(f"The kernel takes a call where {laid.where}, the fake refuses it: {refusal}.")
        if depends_on_values(fake):
            raise NotApplicable("the shapes depend on values")
        for index, (f, r) in enumerate(zip(fake, real)):
            if (f.shape, steps(f), f.dtype) != (r.shape, steps(r), r.dtype):
                return laid.problem(
                    f"Where {laid.where}, the fake kernel says that output {index} has strides {list(f.stride())} and "
                    f"{f.dtype}, the kernel returns {list(r.stride())} and {r.dtype}."
                )
    return None


@ContractCheck(
    "empty",
    "Return early where there is nothing to compute, or refuse it in the fake kernel, too.",
    order=15,
    whole=True,
)
def empty(trial: Trial) -> Problem | None:
    """A size of 0 has an answer, or kernel and fake refuse it."""
    filled = [call for call in trial.subject.calls if call.elements and sizes_of(call)]
    if not filled:
        raise NotApplicable("no call has a size that could be 0")
    # A number among the arguments follows a size that it is equal to, but not a size of 1.
    call, tried = min(filled, key=lambda call: (1 in sizes_of(call), call.elements)), 0
    for size in sizes_of(call):
        other = resized(trial.subject, call, {size: 0})
        if other is None:
            continue
        tried += 1
        try:
            fake_outputs(trial, other)
        except NotApplicable:
            raise
        except Exception:  # the fake refuses the size; "refuses-alike" asks whether the kernel does
            continue
        try:
            trial.fresh_answer(other)
        except Exception as error:
            severity = Severity.broken if trial.subject.spec else Severity.doubtful
            text = f"The fake kernel takes a size of 0, and the kernel does not: {first_line(error)}."
            return Problem(text, severity=severity, call=other)
    if not tried:
        raise NotApplicable("no call with a size of 0 can be made")
    return None
