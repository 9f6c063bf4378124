"""Calls that are wrong: kernel and fake refuse the same ones."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from exportkit.export.models.missing_operators import fake_to_write
from exportkit.operators.contract.check_fakes import fake_outputs, needs_no_fake
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import first_difference
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.memory_layouts import framed
from exportkit.operators.contract.operator_trial import NotApplicable, Trial, first_line
from exportkit.operators.contract.resizing import INTEGERS
from exportkit.operators.contract.sample import Sample, tensors


@ContractCheck("refusals", "Use the same check and the same words in kernel and fake.", order=90, whole=True)
def refusals(trial: Trial) -> Problem | None:
    """Kernel and fake refuse what the SPEC says they refuse, in the same words."""
    spec = trial.subject.spec
    if spec is None:
        raise NotApplicable("no SPEC says what is refused")
    devices = {t.device for call in trial.subject.calls for t in call.tensors}
    refused = [refusal for device in sorted(devices, key=str) for refusal in spec.refusals(device)]
    if not refused:
        return Problem("A SPEC must list calls that are refused, and this one lists none.")
    for refusal in refused:
        call = Sample(refusal.label, refusal.args, refusal.kwargs)
        by_kernel = _refusal(trial, call)
        mode = FakeTensorMode(allow_non_fake_inputs=False)
        faked = call.with_tensors(mode.from_tensor)
        with mode:
            by_fake = _refusal(trial, faked)
        for who, error in (("kernel", by_kernel), ("fake kernel", by_fake)):
            if error is None:
                return Problem(f"The {who} must refuse this call ({refusal.label}), but takes it.", call=call)
            if not isinstance(error, RuntimeError) or not re.search(refusal.message, str(error)):
                wanted = f'The {who} must refuse this call with RuntimeError: "{refusal.message}"'
                return Problem(f"{wanted}, but says {first_line(error)}.", call=call)
        assert by_kernel is not None
        assert by_fake is not None
        said, faked_said = first_line(by_kernel), first_line(by_fake)
        if str(by_kernel).splitlines()[0] != str(by_fake).splitlines()[0]:
            text = (
                f"Kernel and fake must refuse in the same words, but the kernel says {said}, and the fake {faked_said}."
            )
            return Problem(text, call=call)
    return None


def _refusal(trial: Trial, call: Sample, function: Callable[..., Any] | None = None) -> Exception | None:
    try:
        trial.run(call, function)
    except Exception as error:
        return error
    return None


@ContractCheck(
    "refuses-alike",
    "Check rank, sizes, dtype and device in the kernel (STD_TORCH_CHECK), and the same in the fake (torch._check).",
    order=91,
    unless=("fake-runs",),
    whole=True,
)
def refuses_alike(trial: Trial) -> Problem | None:
    """What kernel or fake refuses, the other refuses, too: ranks, dtypes, sizes and devices that do not fit."""
    filled = [call for call in trial.subject.calls if call.elements]
    if not filled:
        raise NotApplicable("every call is empty")
    doubtful = None
    for what, wrong in _wrong_calls(min(filled, key=lambda call: call.elements)):
        try:
            fake_outputs(trial, wrong)
            by_fake = None
        except NotApplicable:
            raise
        except Exception as error:
            by_fake = error
        by_kernel = _refusal(trial, wrong.copied(), trial.subject.overload)
        if by_fake is None and by_kernel is None and (problem := _both_take(trial, what, wrong)):
            if problem.severity is Severity.broken:
                return problem
            doubtful = doubtful or problem
        if (by_fake is None) == (by_kernel is None) or what.startswith(_NUMBER):  # the fake sees no values
            continue
        if by_kernel is None:
            assert by_fake is not None
            return Problem(
                f"With {what}, the fake kernel refuses the call ({first_line(by_fake)}), but the kernel takes it. "
                "A compiled program asks the kernel alone.",
                call=wrong,
            )
        unneeded = needs_no_fake(trial.subject.overload)
        taken = "torch needs no fake kernel of it" if unneeded else "the fake kernel takes it"
        doubtful = doubtful or Problem(
            f"With {what}, the kernel refuses the call ({first_line(by_kernel)}), but {taken}, so that export does not "
            "find the mistake.",
            f"A fake kernel may check the same (torch._check): {fake_to_write(trial.subject.name)}"
            if unneeded
            else None,
            severity=Severity.broken if trial.subject.spec else Severity.doubtful,
            call=wrong,
        )
    return doubtful


_NUMBER = "the number"


def _both_take(trial: Trial, what: str, call: Sample) -> Problem | None:
    """Holds a call to what is asked of valid ones: it may be one."""
    answers = []
    for around in (1.0, 1.0, 60.0):
        own = call.with_tensors(functools.partial(framed, value=around))
        try:
            answers.append(tensors(trial.run(own, trial.subject.overload)))
        except Exception:  # it may refuse where memory begins
            return None
    one, again, other = answers
    if not first_difference(one, again) and (found := first_difference(other, one)):
        return Problem(
            f"With {what}, kernel and fake take the call, and the answer depends on memory beyond a tensor's elements: "
            f"{found}.",
            severity=Severity.doubtful if what.startswith(_NUMBER) else Severity.broken,
            call=call,
        )
    for index, (f, r) in enumerate(zip(fake_outputs(trial, call), one)):
        if f.dtype != r.dtype and what.endswith("alone"):  # else "fake-dtype" has said so
            text = f"the fake kernel says that output {index} is {f.dtype}, and the kernel returns {r.dtype}"
            return Problem(f"With {what}, {text}.", severity=Severity.doubtful, call=call)
    return None


@ContractCheck(
    "devices", "Compare the devices of all tensors in the kernel, and say so in the error.", order=91, whole=True
)
def devices(trial: Trial) -> Problem | None:
    """Tensors on two devices are refused."""
    for call in trial.subject.calls:
        given = call.tensors
        if len(given) < 2 or given[-1].device.type == "cpu":
            continue
        mixed = call.with_tensor(len(given) - 1, given[-1].cpu())
        error = _refusal(trial, mixed)
        if error is None or "device" not in str(error):
            said = "takes them" if error is None else f"says {first_line(error)}"
            return Problem(f'Tensors on two devices must be refused with "device" in the error, but the kernel {said}.')
        return None
    raise NotApplicable("no call has two tensors on an accelerator")


def _wrong_calls(call: Sample) -> Iterator[tuple[str, Sample]]:
    """Yields calls with one tensor that does not fit, each with what is wrong."""
    given = call.tensors
    for number, tensor in enumerate(given):
        name = f"tensor {number}"
        yield f"one dimension more in {name}", call.with_tensor(number, tensor.unsqueeze(0))
        if tensor.dim() and tensor.shape[0]:
            yield f"one dimension less in {name}", call.with_tensor(number, tensor.select(0, 0).clone())
        other = torch.int64 if tensor.is_floating_point() else torch.float32
        yield f"{other} in {name}", call.with_tensor(number, tensor.to(other))
        if len(given) > 1 and tensor.is_floating_point():
            half = torch.float16 if tensor.dtype != torch.float16 else torch.float32
            yield f"{half} in {name} alone", call.with_tensor(number, tensor.to(half))
        if len(given) > 1:
            for dim in range(tensor.dim()):
                longer = torch.cat([tensor, tensor.narrow(dim, 0, min(1, tensor.shape[dim]))], dim)
                if longer.shape != tensor.shape:
                    yield f"one element more in dimension {dim} of {name}", call.with_tensor(number, longer)
                if tensor.shape[dim] > 1:
                    one = tensor.narrow(dim, 0, 1)
                    yield f"a size of 1 in dimension {dim} of {name}", call.with_tensor(number, one)
        # On a GPU a kernel may refuse a number by an assertion, as torch's do, which ends the context.
        if len(given) > 1 and tensor.dtype in INTEGERS and tensor.numel() and tensor.device.type == "cpu":
            beyond = max(size for t in given for size in (*t.shape, 1))
            far = tensor.clone()
            far.view(-1)[-1] = beyond
            yield f"{_NUMBER} {beyond} in {name}", call.with_tensor(number, far)
        if tensor.device.type != "cpu" and len(given) > 1:
            yield f"{name} on the CPU", call.with_tensor(number, tensor.cpu())
