"""The fake kernel, which export and the compiler believe, against the kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exportkit.export.models.missing_operators import fake_to_write
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.fake_kernel import depends_on_values, fake_answer
from exportkit.operators.contract.operator_trial import NotApplicable, Trial, first_line
from exportkit.operators.contract.sample import Sample

_RIGHT = "It returns empty tensors of the right shape, and takes each call that the kernel takes."


@ContractCheck(
    "fake-runs",
    _RIGHT,
    order=1,
    dtypes="some",
    other_sizes=True,
)
def takes_the_call(trial: Trial, call: Sample) -> Problem | None:
    """Export and the compiler need a fake kernel, which takes what the kernel takes."""
    try:
        fake_answer(trial, call)
    except NotApplicable:
        return Problem(
            "torch.export and torch.compile need a fake kernel, and the operator has none.",
            f"Register one with {fake_to_write(trial.subject.name)}. {_RIGHT}",
        )
    except Exception as error:
        return Problem(f"The kernel takes the call, and the fake kernel refuses it: {first_line(error)}.")
    return None


def _compared(trial: Trial, call: Sample, of: Callable[[Tensor], object], what: str) -> Problem | None:
    """Compares a property of each output of the fake and of the kernel."""
    real = trial.outputs(call)
    try:
        fake = fake_answer(trial, call)
    except Exception as error:
        raise NotApplicable(f"the fake kernel has no answer: {first_line(error)}") from error
    if len(fake) != len(real):
        if what != "shape":
            raise NotApplicable("the fake kernel returns another number of tensors")
        return Problem(f"The fake kernel returns {len(fake)} tensors, and the kernel {len(real)}.")
    for index, (f, r) in enumerate(zip(fake, real)):
        if not _equal(of(f), of(r)):
            said, returned = _said(of(f)), _said(of(r))
            return Problem(
                f"The fake kernel says that output {index} has {what} {said}, the kernel returns {returned}."
            )
    return None


def _equal(fake: object, real: object) -> bool:
    """Compares two properties. A size that depends on values may be any."""
    if isinstance(fake, tuple) and isinstance(real, tuple):
        return len(fake) == len(real) and all(isinstance(f, torch.SymInt) or f == r for f, r in zip(fake, real))
    return fake == real


def _said(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


_HINT = "Make the fake kernel compute it from its arguments as the kernel does."


@ContractCheck("fake-shape", _HINT, order=10, dtypes="some", other_sizes=True)
def shape(trial: Trial, call: Sample) -> Problem | None:
    """The fake knows the shape of every output."""
    return _compared(trial, call, lambda t: tuple(t.shape), "shape")


@ContractCheck("fake-strides", _HINT, order=10, dtypes="some", other_sizes=True)
def strides(trial: Trial, call: Sample) -> Problem | None:
    """The fake knows the strides of every output."""
    if shape(trial, call) is not None or depends_on_values(fake_answer(trial, call)):
        raise NotApplicable("the shapes differ, or depend on values")
    return _compared(trial, call, steps, "strides")


def steps(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides that lead from one element to another."""
    return (
        () if tensor.numel() == 0 else tuple(st if size > 1 else 0 for st, size in zip(tensor.stride(), tensor.shape))
    )


@ContractCheck("fake-dtype", _HINT, order=10, dtypes="some", other_sizes=True)
def dtype(trial: Trial, call: Sample) -> Problem | None:
    """The fake knows the dtype of every output."""
    return _compared(trial, call, lambda t: t.dtype, "dtype")


@ContractCheck("fake-device", _HINT, order=10, dtypes="some", other_sizes=True)
def device(trial: Trial, call: Sample) -> Problem | None:
    """The fake knows the device of every output."""
    return _compared(trial, call, lambda t: t.device, "device")
