"""What an operator's fake kernel answers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from exportkit.export.torch_patches.opaque import has_one_kernel, has_own_fake, opaque_operators, reads_memory
from exportkit.operators.contract.operator_trial import NotApplicable, Trial
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


def depends_on_values(fake: list[Tensor]) -> bool:
    """Whether a size of a fake kernel's outputs does."""
    return any(isinstance(size, torch.SymInt) for output in fake for size in output.shape)
