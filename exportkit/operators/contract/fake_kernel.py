"""What an operator's fake kernel answers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from exportkit.export.torch_patches.opaque import has_one_kernel, has_own_fake, opaque_operators, reads_memory
from exportkit.operators.contract.operator_trial import NotApplicable, Trial
from exportkit.operators.contract.sample import Sample, tensors


def fake_answer(trial: Trial, call: Sample) -> list[Tensor]:
    """Returns the outputs of the fake kernel, which are kept for the checks that follow.

    Raises:
        NotApplicable: The operator has no fake kernel.
    """
    return trial.remembered("fake", call, lambda: fake_outputs(trial, call))


def fake_outputs(trial: Trial, call: Sample) -> list[Tensor]:
    """Calls the fake kernel. A size that depends on values is a symbol, as in an export.

    Raises:
        NotApplicable: The operator has no fake kernel.
    """
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

    Raises:
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


@dataclass(frozen=True)
class SymbolicAnswer:
    """The fake kernel's outputs, as formulas of the sizes of its arguments.

    Attributes:
        call: The call.
        sizes: (tensor, dimension) of each size that is a symbol, with the symbol.
        shapes: The shape of each output.
        fixed: (tensor, dimension) of the sizes that the fake kernel made constants.
        conditions: What must be true of the symbols for the formulas to hold.
    """

    call: Sample
    sizes: dict[tuple[int, int], sympy.Symbol]
    shapes: list[tuple[sympy.Expr, ...]]
    fixed: tuple[tuple[int, int], ...]
    conditions: tuple[sympy.Basic, ...]

    def shapes_at(self, call: Sample) -> list[tuple[int, ...]] | None:
        """Returns the shapes for the sizes of another call of the same ranks.

        Returns None where the formulas do not hold, or depend on values.
        """
        values: dict[sympy.Basic, int] = {}
        for number, (tensor, own) in enumerate(zip(call.tensors, self.call.tensors)):
            for dim, size in enumerate(tensor.shape):
                symbol = self.sizes.get((number, dim))
                if size != own.shape[dim] if symbol is None else size < 2 or values.setdefault(symbol, size) != size:
                    return None
        if not all(condition.xreplace(values) == sympy.true for condition in self.conditions):
            return None
        found = [tuple(sympy.sympify(expr.xreplace(values)) for expr in shape) for shape in self.shapes]
        if not all(expr.is_number for shape in found for expr in shape):
            return None
        return [tuple(map(int, shape)) for shape in found]


def symbolic_answer(trial: Trial, call: Sample) -> SymbolicAnswer:
    """Calls the fake kernel with a symbol for each size that is at least 2.

    Raises:
        NotApplicable: No size can be a symbol.
    """
    from torch._dynamo.source import ConstantSource  # all of the compiler, a second for a process that makes no fakes

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    number = itertools.count()

    def symbolic(tensor: Tensor) -> Tensor:
        kinds = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in tensor.shape]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
        return mode.from_tensor(
            tensor.detach(), symbolic_context=context, source=ConstantSource(f"argument_{next(number)}")
        )

    own = call.with_tensors(symbolic)
    sizes = {
        (position, dim): _formula(size)
        for position, tensor in enumerate(own.tensors)
        for dim, size in enumerate(tensor.shape)
        if isinstance(size, torch.SymInt)
    }
    if not sizes:
        raise NotApplicable("no size can vary")
    outputs = _called(trial, call, own, mode)
    shapes = [tuple(_formula(size) for size in output.shape) for output in outputs]
    fixed = tuple(place for place, symbol in sizes.items() if env.replace(symbol).is_number)
    return SymbolicAnswer(call, sizes, shapes, fixed, tuple(guard.expr for guard in env.guards))


def _formula(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
