"""The values of an answer: always the same, those of a reference, also of what is not finite; and each input shows."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from exportkit.operators.contract.call_code import number_code
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import first_difference
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.operator_spec import default_tolerance
from exportkit.operators.contract.operator_trial import NotApplicable, Trial, first_line, is_out_of_memory
from exportkit.operators.contract.resizing import grown, resized
from exportkit.operators.contract.sample import Sample, upcast


def reference_of(trial: Trial) -> Callable[..., Any]:
    """Returns the reference, whose errors say that they are its own. Raises NotApplicable if there is none."""
    reference = trial.subject.reference
    if reference is None:
        raise NotApplicable("no reference is given")

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return reference(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(f"the reference raises {first_line(error)}") from error

    return called


def tolerance(trial: Trial, dtype: torch.dtype) -> tuple[float, float]:
    """Returns (rtol, atol) of the kernel against the reference: the SPEC's, or the default ones."""
    return trial.subject.spec.tolerance(dtype) if trial.subject.spec else default_tolerance(dtype)


_RUNS = 3
_LARGE_RUNS = 2
_LARGE = 4096


@ContractCheck("runs", "Make the kernel take the call, or do not list the call as a valid one.", order=0)
def runs(trial: Trial, call: Sample) -> Problem | None:
    """A valid call has an answer."""
    try:
        trial.answer(call)
    except NotApplicable as refusal:
        if is_out_of_memory(str(refusal)):
            raise
        return Problem(f"A valid call must have an answer, but {refusal}.")
    return None


@ContractCheck(
    "determinism",
    "Initialise all memory that is read, refuse indices that lead beyond it, draw no random numbers, and sum in one "
    "order: no atomic additions of floats.",
    order=5,
)
def determinism(trial: Trial, call: Sample) -> Problem | None:
    """The same call has the same answer, bit for bit."""
    first = trial.answer(call)
    for run in range(1, _RUNS if call.elements <= _LARGE else _LARGE_RUNS):
        with filled_memory() if run == 1 else contextlib.nullcontext():
            again = trial.fresh_answer(call)
        if found := first_difference(again, first):
            text = f"The same call must have the same answer, bit for bit, but {found}."
            return Problem(text, shown="first, second = {op}(*args), {op}(*args)")
    return _found_by_address(trial, call) if call.elements <= _LARGE and trial.subject.spec is None else None


def _found_by_address(trial: Trial, call: Sample) -> Problem | None:
    """Says so if other values in the memory of an earlier call do not have the answer that they have elsewhere."""
    own = call.copied()
    trial.run(own)
    for tensor in own.tensors:
        tensor.copy_(tensor.float() * 0.75 if tensor.is_floating_point() else tensor)
    expected = trial.varied_answer(own, "other values")
    if trial.subject.is_mutable or not (found := first_difference(trial.used_up(own), expected)):
        return None
    text = f"Other values in the memory of an earlier call must have their own answer, but {found}"
    return Problem(f"{text} (there, and in new memory).")


_M_PERTURB = -6


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Lets the C library fill new memory with bytes that are no usual number: what nobody wrote shows. glibc can."""
    fill = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    fill(_M_PERTURB, 0x80)  # memory is filled with its complement: 0x7f7f is NaN in float16, and 3e38 in float32
    try:
        yield
    finally:
        fill(_M_PERTURB, 0)


_HINT = "Look at the smallest call: correct the kernel, or the reference."


@ContractCheck("reference", _HINT, order=30, unless=("determinism",))
def equals_reference(trial: Trial, call: Sample) -> Problem | None:
    """The kernel computes what the reference computes in the same dtype."""
    actual, expected = trial.answer(call), trial.fresh_answer(call, reference_of(trial))
    return _compared(trial, actual, expected, "the reference")


@ContractCheck("reference-float64", _HINT, order=30, unless=("determinism", "reference"))
def equals_reference_in_float64(trial: Trial, call: Sample) -> Problem | None:
    """The kernel is as exact as its dtype: a reference in the kernel's own dtype could share its error."""
    actual, exact = trial.answer(call), trial.fresh_answer(upcast(call), reference_of(trial))
    expected = [e.to(a.dtype) for a, e in zip(actual, exact)] if len(actual) == len(exact) else exact
    return _compared(trial, actual, expected, "the reference in float64")


def _compared(trial: Trial, actual: list[Tensor], expected: list[Tensor], what: str) -> Problem | None:
    found = first_difference(actual, expected, functools.partial(tolerance, trial))
    return Problem(f"The answer must equal {what}, but {found}.") if found else None


# --- the kernel in float64 --------------------------------------------------------------------------------------------

_FAR = 8.0
_ROW = 4099
_MOST = 2**17  # elements of a call with such rows
_RANGES = (("", 1.0, 0.0), (" times 64", 64.0, 0.0), (" plus 64", 1.0, 64.0))


@ContractCheck(
    "own-float64",
    "Look at what differs between the dtypes: the vector width and the tail, the type of sums, and casts. And at "
    "functions that overflow or cancel.",
    order=31,
    dtypes="some",
    most=10,
    unless=("determinism", "reference"),
)
def equals_itself_in_float64(trial: Trial, call: Sample) -> Problem | None:
    """Without a reference, the kernel computes in each dtype what it computes in float64, but for rounding."""
    if trial.subject.reference is not None or trial.subject.spec is not None or call.floating_dtype is None:
        raise NotApplicable("there is a reference or a SPEC, or nothing is floating")
    variants = [(call, call.floating_dtype, name, factor, more) for name, factor, more in _RANGES]
    if call.floating_dtype != torch.float32 or call.elements > _LARGE:
        del variants[1:]
    elif (long := _long(trial, call)) is not None:  # a sum of many numbers shows in 16 bits how it is taken
        variants += [(long, dtype, f" in rows of {_ROW}", 1.0, 0.0) for dtype in (torch.bfloat16, torch.float16)]
    for own, dtype, name, factor, more in variants:
        found = None
        for close in (1.0, 0.77, 1.31):  # a decision that rounding turns shows at one of them, and a fault at all
            if not (found := _farther_than_rounding(trial, _moved(own, dtype, close * factor, more))):
                break
        if found:
            text = f"The kernel must compute in {str(dtype)[6:]} what it does in float64, but {found}"
            return Problem(f"{text} (its floating arguments{name}).", severity=Severity.doubtful)
    return None


def _long(trial: Trial, call: Sample) -> Sample | None:
    last = next((t.shape[-1] for t in call.tensors if t.dim()), 0)
    small = last > 1 and grown(call, last, _ROW) <= _MOST
    found = resized(trial.subject, call, {last: _ROW}) if small else None
    try:
        return None if found is None or not trial.fresh_answer(found) else found
    except Exception:  # it may refuse the size
        return None


def _farther_than_rounding(trial: Trial, call: Sample) -> str | None:
    """Compares with float64, where inputs that differ by their rounding show what rounding alone may do."""
    dtype = call.floating_dtype
    assert dtype is not None
    try:
        actual = trial.fresh_answer(call)
    except Exception:  # it may refuse the dtype, or the values
        return None
    if dtype == torch.float64:
        return _single(call, actual)
    if (exact := _in_float64(trial, call)) is None:
        raise NotApplicable("the operator takes no float64")
    step = torch.finfo(dtype).eps
    near = [_in_float64(trial, upcast(call).with_tensors(lambda t: _jittered(t, step))) or exact for _ in range(2)]
    for index, (a, e) in enumerate(zip(actual, exact)):
        if a.shape != e.shape or not a.is_floating_point() or a.element_size() < 2 or not a.numel():
            continue
        finite = e.to(a.dtype).isfinite()
        error = (a.double() - e).abs().masked_fill(~finite, 0.0).nan_to_num(math.inf)
        others = [n[index] for n in near if n[index].shape == e.shape]
        noise = max((float((other - e).abs().nan_to_num(0.0).max()) for other in others), default=0.0)
        allowed = _FAR * (noise + max(step, torch.finfo(a.dtype).eps) * float(e.abs().masked_fill(~finite, 0.0).max()))
        if float(error.max()) > allowed:
            at = error.flatten().argmax()
            return f"in output {index}, one is {a.flatten()[at].item()!r}, and in float64 {e.flatten()[at].item()!r}"
    return None


def _moved(call: Sample, dtype: torch.dtype, factor: float, more: float) -> Sample:
    """Returns the call at other numbers, and with those of its main dtype in another."""

    def moved(t: Tensor) -> Tensor:
        return (t.double() * factor + more).to(dtype if t.dtype == call.floating_dtype else t.dtype)

    return call.with_tensors(lambda t: moved(t) if t.is_floating_point() else t)


def _jittered(tensor: Tensor, step: float) -> Tensor:
    return tensor * (1 + step * (2 * torch.rand_like(tensor) - 1)) if tensor.is_floating_point() else tensor


def _single(call: Sample, answers: list[Tensor]) -> str | None:
    """Says so if float64 outputs have the digits of float32, as if computed in it."""

    def fits(values: Tensor, dtype: torch.dtype) -> bool:
        return bool((values.to(dtype).double() == values).all())

    if any(fits(t, torch.float32) for t in call.tensors if t.is_floating_point()):
        return None
    for index, a in enumerate(answers):
        whole = fits(a, torch.bfloat16) or fits(a, torch.float16)  # as a sign, or what is rounded on purpose
        if a.dtype == torch.float64 and a.numel() > 3 and fits(a, torch.float32) and not whole:
            return f"all of output {index} are float32's numbers"
    return None


# --- NaN and infinities -----------------------------------------------------------------------------------------------

_NAN_HINT = (
    "Use comparisons and functions that keep NaN: fmin, fmax, std::min and std::max drop it. If the operator means to "
    "drop NaN, give it a reference that says so."
)
_FEW_ELEMENTS = 4096


@ContractCheck("nan", _NAN_HINT, order=45, dtypes="some", most=6, unless=("determinism", "reference"))
def nan(trial: Trial, call: Sample) -> Problem | None:
    """NaN that goes in comes out, wherever a reference, the kernel in float64, or its influence says that it does."""
    return _kept(trial, call, (math.nan,))


@ContractCheck("infinity", _NAN_HINT, order=45, dtypes="some", most=6, unless=("determinism", "reference"))
def infinity(trial: Trial, call: Sample) -> Problem | None:
    """An infinite input gives a finite output only where a reference, or the kernel in float64, says so."""
    if trial.subject.reference is None and call.floating_dtype == torch.float64:
        raise NotApplicable("there is nothing to compare with: no reference is given, and the call is in float64")
    return _kept(trial, call, (math.inf, -math.inf))


def _kept(trial: Trial, call: Sample, values: tuple[float, ...]) -> Problem | None:
    clean = trial.answer(call)
    if call.elements > _FEW_ELEMENTS or not _all_finite([*clean, *call.tensors]):
        raise NotApplicable("the call is large, or it is not finite already")
    if not all(t.numel() for t in call.tensors):
        raise NotApplicable("a tensor is empty, and a sum over nothing is 0 whatever it is multiplied with")
    for value in values:
        for number, where, poisoned in _poisoned(call, value):
            if missing := _laundered(trial, call, poisoned, number, where, value):
                severity = Severity.broken if trial.subject.reference else Severity.doubtful
                element = f"args[{number}].view(-1)[{where}]"
                shown = f"args = list(args)\n{element} = {number_code(value)}\nprint({{op}}(*args))"
                if trial.subject.is_mutable or any(not isinstance(a, Tensor) for a in call.args[: number + 1]):
                    shown = "{call}"
                name = list(trial.bound(call))[number] if number < len(trial.bound(call)) else "an input"
                return Problem(f"Element {where} of {name} is {value}, {missing}.", severity=severity, shown=shown)
    return None


def _all_finite(values: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in values if t.is_floating_point())


def _with_element(call: Sample, number: int, where: int, change: Callable[[Tensor], Any]) -> Sample:
    """Returns the call with one element of its tensor `number` changed."""
    own = call.with_tensors(Tensor.contiguous).copied()
    element = own.tensors[number].view(-1)[where]
    element.copy_(torch.as_tensor(change(element)).to(element))
    return own


def _poisoned(call: Sample, value: float) -> Iterator[tuple[int, int, Sample]]:
    """Yields the call with the first and the last element of each floating tensor changed to the value."""
    for number, tensor in enumerate(call.tensors):
        if tensor.is_floating_point() and tensor.numel():
            for where in sorted({0, tensor.numel() - 1}):
                yield number, where, _with_element(call, number, where, lambda _: value)


def _laundered(trial: Trial, call: Sample, poisoned: Sample, number: int, where: int, value: float) -> str | None:
    """Says where an output should not be finite and is."""
    actual = trial.varied_answer(poisoned, f"{value} in an argument")
    if trial.subject.reference is not None:
        expected, what = trial.varied_answer(poisoned, f"{value}", reference_of(trial)), "the reference"
    elif (wide := _in_float64(trial, poisoned)) is not None:
        expected, what = wide, "the kernel in float64"
    elif value == value:
        return None
    else:
        return _without_influence(trial, call, actual, number, where)
    for index, (a, e) in enumerate(zip(actual, expected)):
        if a.is_floating_point() and e.is_floating_point() and a.shape == e.shape:
            bad = (e.isnan() & ~a.isnan()) if value != value else (e.isinf() & a.isfinite())
            if bool(bad.any()):
                at = bad.nonzero()[0].tolist()
                return (
                    f"and by {what}, element {at} of output {index} is {e[tuple(at)].item()}, but the operator returns "
                    f"{a[tuple(at)].item()!r}"
                )
    if what == "the kernel in float64" and value != value:
        return _without_influence(trial, call, actual, number, where)
    return None


def _in_float64(trial: Trial, call: Sample) -> list[Tensor] | None:
    if call.floating_dtype == torch.float64:
        return None
    try:
        return trial.fresh_answer(upcast(call))
    except Exception:  # the operator may not take float64; then nothing is compared with it
        return None


def _without_influence(trial: Trial, call: Sample, actual: list[Tensor], number: int, where: int) -> str | None:
    """Says so if a finite change of the element changes a floating output, and NaN leaves no trace in any output."""
    outputs = [t for t in actual if t.is_floating_point()]
    if not outputs or not _all_finite(outputs):
        return None
    clean = [t for t in trial.answer(call) if t.is_floating_point()]
    for change in (lambda x: x + 1, lambda x: -2 * x - 1):
        changed = trial.varied_answer(_with_element(call, number, where, change), "other values")
        other = [t for t in changed if t.is_floating_point()]
        if found := first_difference(other, clean):
            return f"which other numbers in its place show {found}, but all outputs are finite"
    return None


# --- what is not looked at --------------------------------------------------------------------------------------------


_FEW_ELEMENTS = 4096
_CALLS = 12


@ContractCheck(
    "influence",
    "Look at the first and the last step of each loop, and at what the kernel does with each argument. If it is unused "
    "on purpose, say so where users read it.",
    order=46,
    dtypes="first",
    unless=("determinism", "reference"),
    whole=True,
)
def influence(trial: Trial) -> Problem | None:
    """Each floating tensor shows in an answer, and so do its first and last elements where the others do."""
    subject = trial.subject
    if subject.reference is not None or subject.spec is not None or subject.is_mutable:
        raise NotApplicable("there is a reference or a SPEC, or the operator writes to an argument")
    silent: dict[int, Problem] = {}
    heard: set[int] = set()
    calls = [call for call in subject.calls if 0 < call.elements <= _FEW_ELEMENTS and _floating_only(call)]
    for call in calls[:_CALLS]:
        for number, tensor in enumerate(call.tensors):
            if not _shows(trial, call, number, ...):
                silent.setdefault(number, _doubt(call, f"No value of tensor {number} shows in any answer."))
                continue
            heard.add(number)
            for what, end, neighbour in _ends(trial, call, tensor):
                if not _shows(trial, call, number, end) and _shows(trial, call, number, neighbour):
                    text = f"No value of {what} of tensor {number} shows in the answer, and those beside it do."
                    return _doubt(call, text)
    if not heard:
        raise NotApplicable("no small call has floating tensors alone")
    return next((problem for number, problem in silent.items() if number not in heard), None)


def _floating_only(call: Sample) -> bool:
    """Integers and masks choose among elements, and others then do not show."""
    if not all(t.is_floating_point() and t.element_size() > 1 and t.numel() for t in call.tensors):
        return False
    return all(bool(t.isfinite().all()) for t in call.tensors)


def _doubt(call: Sample, text: str) -> Problem:
    return Problem(text, severity=Severity.doubtful, call=call)


def _shows(trial: Trial, call: Sample, number: int, where: Any) -> bool:
    """Whether another value there changes an answer."""
    for change in (10.0, -10.0):
        own = call.copied()
        own.tensors[number][where] += change
        if first_difference(trial.varied_answer(own, "other values"), trial.answer(call)):
            return True
    return False


def _ends(trial: Trial, call: Sample, tensor: Tensor) -> list[tuple[str, Any, Any]]:
    """Returns the ends of a tensor, each with its neighbour. Not after a crop: if outputs have sizes of their own."""
    sizes = {1, *(size for t in call.tensors for size in t.shape)}
    if any(size not in sizes for t in trial.answer(call) for size in t.shape):
        return []
    dims = [dim for dim in sorted({0, tensor.dim() - 1}) if dim < tensor.dim() and tensor.shape[dim] > 2]
    ends = (("first", 0, 1), ("last", -1, -2))
    return [
        (f"the {what} of dimension {dim}", (*[slice(None)] * dim, end), (*[slice(None)] * dim, beside))
        for dim in dims
        for what, end, beside in ends
    ]
