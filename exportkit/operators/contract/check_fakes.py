"""The fake kernel, which export and the compiler believe, against the kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._library.simple_registry import singleton
from torch._library.utils import can_generate_trivial_fake_impl
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from exportkit.export.models.missing_operators import fake_to_write
from exportkit.export.torch_patches.opaque import has_one_kernel, has_own_fake, opaque_operators, reads_memory
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.operator_trial import NotApplicable, Trial, first_line
from exportkit.operators.contract.sample import Sample, tensors


def fake_answer(trial: Trial, call: Sample) -> list[Tensor]:
    """Returns the outputs of the fake kernel, as `fake_outputs`. They are kept for the checks that follow."""
    return trial.remembered("fake", call, lambda: fake_outputs(trial, call))


def fake_outputs(trial: Trial, call: Sample) -> list[Tensor]:
    """Calls the fake kernel, or raises NotApplicable. A size that depends on values is a symbol, as in an export."""
    try:
        return _faked(trial, call, None)
    except UnsupportedOperatorException as error:
        raise NotApplicable("it has no fake kernel") from error
    except (DynamicOutputShapeException, DataDependentOutputException):
        return _faked(trial, call, ShapeEnv())


def _faked(trial: Trial, call: Sample, env: ShapeEnv | None) -> list[Tensor]:
    mode = FakeTensorMode(shape_env=env, static_shapes=True)
    own = call.with_tensors(lambda t: mode.from_tensor(t.detach()))
    return _called(trial, call, own, mode)


def _called(trial: Trial, call: Sample, own: Sample, mode: FakeTensorMode) -> list[Tensor]:
    """Calls the operator with the fakes of a call.

    NotApplicable: torch would call the kernel, and it reads memory, which fakes do not have.
    """
    operator = trial.subject.overload
    if has_one_kernel(operator) and not has_own_fake(operator):
        given = call.copied()
        if trial.remembered("opaque", None, lambda: reads_memory(operator, given.args, dict(given.kwargs))):
            raise NotApplicable("it has no fake kernel")
    with opaque_operators(), mode:
        return tensors(operator(*own.args, **own.kwargs))


def needs_no_fake(operator: OpOverload) -> bool:
    """Whether the operator has no fake and needs none: it only writes into an argument, so torch can trace it."""
    given = singleton.find(operator.name()).fake_impl.kernel is not None or has_own_fake(operator)
    return not given and can_generate_trivial_fake_impl(operator)


def depends_on_values(fake: list[Tensor]) -> bool:
    """Whether a size of a fake kernel's outputs does."""
    return any(isinstance(size, torch.SymInt) for output in fake for size in output.shape)


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
        text = "torch.export and torch.compile need a fake kernel, and the operator has none."
        return Problem(text, f"Register one with {fake_to_write(trial.subject.name)}. {_RIGHT}")
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
