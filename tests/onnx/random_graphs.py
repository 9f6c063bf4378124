"""Random graphs of a few operators, drawn by hypothesis, and inputs with all that is special about numbers.

All tensors have the shape [rows, 4]. A graph is exact where every operator has one right answer to the last bit. What
is not exact is a result, and nothing is computed from it: rounding and comparing would make much of a last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from exportkit.arr_coc.ops.bias_relu import bias_relu
from exportkit.arr_coc.ops.muladd import muladd
from exportkit.arr_coc.ops.reduce_sum import reduce_sum
from exportkit.arr_coc.ops.softmax import softmax

COLUMNS = 4
FLOATS = (torch.float32, torch.float16)
INTEGERS = (torch.int64, torch.int32)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
F32, INT = (torch.float32,), (torch.int64,)


@dataclass(frozen=True)
class Operator:
    """An operator of the graphs.

    Attributes:
        function: Takes tensors of one dtype. Its result has their shape.
        dtypes: What it takes.
        count: How many tensors it takes.
        exact: Whether the result is the same to the last bit.
        result: The dtype of the result; None if it is the tensors'.
    """

    function: Callable[..., Tensor]
    dtypes: Sequence[torch.dtype]
    count: int = 1
    exact: bool = True
    result: torch.dtype | None = None


def _positions(x: Tensor) -> Tensor:
    return (torch.arange(x.shape[0]) // 2)[:, None].expand(-1, COLUMNS)


def _scattered(kind: str, include_self: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: x.scatter_reduce(0, _positions(x), y, kind, include_self=include_self)


def _assigned(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[x > y] = 0
    return x


def _even(x: Tensor) -> Tensor:
    """Numbers of which every function has a well-conditioned value; NaN stays."""
    return x.clamp(-8, 8)


NUMBERS = (*FLOATS, *INTEGERS)
OPERATORS: Mapping[str, Operator] = {
    "add": Operator(torch.add, (*F32, *INTEGERS), 2),
    "subtract": Operator(torch.sub, (*F32, *INTEGERS), 2),
    "multiply": Operator(torch.mul, (*F32, *INTEGERS), 2),
    "times 3": Operator(lambda x: x * 3, INTEGERS),
    "divide": Operator(torch.div, F32, 2),
    "floor divide by 3": Operator(lambda x: torch.div(x, 3, rounding_mode="floor"), (*F32, *INTEGERS)),
    "truncate divide by -3": Operator(lambda x: torch.div(x, -3, rounding_mode="trunc"), INTEGERS),
    "remainder by -3": Operator(lambda x: torch.remainder(x, -3), (*F32, *INTEGERS)),
    "fmod by 3": Operator(lambda x: torch.fmod(x, 3), (*F32, *INTEGERS)),
    "negative": Operator(torch.neg, NUMBERS),
    "absolute": Operator(torch.abs, NUMBERS),
    "clamp": Operator(lambda x: x.clamp(-2, 3), NUMBERS),
    "clamp above": Operator(lambda x: x.clamp(max=1), NUMBERS),
    "maximum": Operator(torch.maximum, NUMBERS, 2),
    "minimum": Operator(torch.minimum, NUMBERS, 2),
    "relu": Operator(torch.relu, (*FLOATS, torch.int32)),  # ONNX Runtime has no kernel for int64
    "round": Operator(torch.round, FLOATS),
    "floor": Operator(torch.floor, FLOATS),
    "truncate": Operator(torch.trunc, FLOATS),
    "less": Operator(torch.lt, NUMBERS, 2, result=torch.bool),
    "equal": Operator(torch.eq, DTYPES, 2, result=torch.bool),
    "is NaN": Operator(torch.isnan, FLOATS, result=torch.bool),
    "not": Operator(torch.logical_not, (torch.bool,)),
    "exclusive or": Operator(torch.logical_xor, (torch.bool,), 2),
    "to int64": Operator(lambda x: x.long(), (torch.int32, torch.bool), result=torch.int64),
    "to float32": Operator(lambda x: x.float(), (torch.float16, torch.int32, torch.bool), result=torch.float32),
    "to int32": Operator(lambda x: x.int(), (torch.int64, torch.bool), result=torch.int32),
    "to bool": Operator(lambda x: x.bool(), NUMBERS, result=torch.bool),
    "where positive": Operator(lambda x, y: torch.where(x > 0, x, y), NUMBERS, 2),
    "fill": Operator(lambda x: x.masked_fill(x > 1, 2), NUMBERS),
    "x[mask] = 0": Operator(_assigned, NUMBERS, 2),
    "masked scatter": Operator(lambda x, y: x.masked_scatter(x > y, y), (*F32, *INTEGERS), 2),
    "sorted": Operator(lambda x: x.sort(1)[0], NUMBERS),
    "sorted down": Operator(lambda x: x.sort(0, descending=True)[0], NUMBERS),
    "order": Operator(lambda x: torch.sort(x, dim=1, stable=True)[1], NUMBERS, result=torch.int64),
    "greatest 3": Operator(lambda x: x.topk(3, 1)[0].repeat(1, 2)[:, :COLUMNS], NUMBERS),
    "greatest": Operator(lambda x: x.amax(0, keepdim=True).expand_as(x), NUMBERS),
    "least": Operator(lambda x: x.min(1, keepdim=True)[0].expand_as(x), NUMBERS),
    "first greatest": Operator(lambda x: x.argmax(1, keepdim=True).expand_as(x), NUMBERS, result=torch.int64),
    "first least": Operator(lambda x: x.argmin(0, keepdim=True).expand_as(x), NUMBERS, result=torch.int64),
    "rolled": Operator(lambda x: x.roll((1, -2), (0, 1)), (*F32, *INTEGERS)),
    "flipped": Operator(lambda x: x.flip(0), DTYPES),
    "turned": Operator(lambda x: torch.cat([x[:, 2:], x[:, :2]], 1), DTYPES),
    "gathered": Operator(lambda x: x.gather(0, _positions(x)), DTYPES),
    "repeated": Operator(lambda x: x[:1].repeat_interleave(x.shape[0], 0), (*F32, *INTEGERS)),
    "scattered sum": Operator(_scattered("sum", False), INTEGERS, 2),
    "scattered greatest": Operator(_scattered("amax", False), (*F32, *INTEGERS), 2),
    "scattered least": Operator(_scattered("amin", True), (*F32, *INTEGERS), 2),
    "scattered mean": Operator(_scattered("mean", True), F32, 2, exact=False),
    "half scattered": Operator(lambda x, y: x.scatter_add(0, _positions(x), y), (torch.float16,), 2, exact=False),
    "running sum": Operator(lambda x: x.cumsum(0), INT),
    "sum of integers": Operator(lambda x: x.sum(0, keepdim=True).expand_as(x), INT),
    "product of integers": Operator(lambda x: x.prod(1, keepdim=True).expand_as(x), INT),
    "count": Operator(lambda x: x.sum(1, keepdim=True).expand(-1, COLUMNS), (torch.bool,), result=torch.int64),
    "any": Operator(lambda x: x.any(0, keepdim=True).expand_as(x), (torch.bool,)),
    "bits": Operator(lambda x: (x & 6) ^ (x | 1), INTEGERS),
    "shifted": Operator(lambda x: (x << 2) >> 1, INTEGERS),
    "bias_relu": Operator(lambda x: bias_relu(x, x[0]), FLOATS),
    "muladd": Operator(lambda x, y: muladd(x, y, 0.5), F32, 2, exact=False),
    "reduce_sum": Operator(lambda x: reduce_sum(_even(x), 1)[:, None].expand_as(x), F32, exact=False),
    "softmax": Operator(lambda x: softmax(_even(x)), FLOATS, exact=False),
    "torch's softmax": Operator(lambda x: _even(x).softmax(1), FLOATS, exact=False),
    "exponential": Operator(lambda x: _even(x).exp(), F32, exact=False),
    "sigmoid": Operator(lambda x: _even(x).sigmoid(), F32, exact=False),
    "gelu": Operator(lambda x: torch.nn.functional.gelu(_even(x)), F32, exact=False),
    "angle": Operator(lambda x, y: torch.atan2(x, y), F32, 2, exact=False),
    "mean": Operator(lambda x: _even(x).mean(0, keepdim=True).expand_as(x), F32, exact=False),
    "variance": Operator(lambda x: _even(x).var(1, keepdim=True).expand_as(x), F32, exact=False),
    "product": Operator(lambda x, y: _even(x) @ (_even(y).T @ _even(y)), F32, 2, exact=False),
}


@dataclass(frozen=True)
class Step:
    """An operator, and which of the tensors so far it takes: the inputs, and the results of the steps before."""

    operator: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A few steps. Their results are the graph's."""

    dtypes: tuple[torch.dtype, ...]
    steps: tuple[Step, ...]

    @property
    def exact(self) -> list[bool]:
        """Whether each result is exact."""
        return [OPERATORS[step.operator].exact for step in self.steps]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Two inputs and 2 to 6 steps."""
    inputs = tuple(draw(st.lists(st.sampled_from(DTYPES), min_size=2, max_size=2)))
    tensors: list[torch.dtype | None] = list(inputs)  # None: not exact
    steps = []
    for _ in range(draw(st.integers(2, 6))):
        fitting = [name for name, op in OPERATORS.items() if any(dtype in op.dtypes for dtype in tensors)]
        name = draw(st.sampled_from(fitting))
        operator = OPERATORS[name]
        first = draw(st.sampled_from([i for i, dtype in enumerate(tensors) if dtype in operator.dtypes]))
        alike = [i for i, dtype in enumerate(tensors) if dtype == tensors[first]]
        others = [draw(st.sampled_from(alike)) for _ in range(operator.count - 1)]
        steps.append(Step(name, (first, *others)))
        tensors.append((operator.result or tensors[first]) if operator.exact else None)
    return Graph(inputs, tuple(steps))


class Net(torch.nn.Module):
    """Computes a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        tensors = [x, y]
        for step in self.graph.steps:
            tensors.append(OPERATORS[step.operator].function(*(tensors[i] for i in step.operands)))
        return tensors[2:]


_SPECIAL = (torch.nan, torch.inf, -torch.inf, -0.0, 0.5, 2.5)


def draw(dtype: torch.dtype, rows: int, *, special: bool, generator: torch.Generator) -> Tensor:
    """Few different numbers, and if `special`: NaN, infinities, halves, the ends of integers."""
    shape = (rows, COLUMNS)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    numbers = torch.randint(-5, 6, shape, generator=generator).to(dtype)
    if not special:
        return numbers / 4 if dtype.is_floating_point else numbers
    ends = _SPECIAL if dtype.is_floating_point else (torch.iinfo(dtype).max, torch.iinfo(dtype).min + 1, 2**30 + 1)
    chosen = torch.tensor(ends, dtype=dtype)[torch.randint(0, len(ends), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.3, chosen, numbers)
