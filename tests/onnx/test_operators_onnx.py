"""Operators that exportkit translates answer in ONNX Runtime as in torch, with all that is special about numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from exportkit import ExportSpec
from tests.onnx.conversions import checked, convert_spec, run, run_reference, session_of

pytestmark = pytest.mark.slow

COLUMNS = 4
FLOATS, INTEGERS, BOOL = (torch.float32, torch.float16), (torch.int64, torch.int32), (torch.bool,)
NUMBERS, DTYPES = (*FLOATS, *INTEGERS), (*FLOATS, *INTEGERS, *BOOL)
F32, INT, F32_INT = (torch.float32,), (torch.int64,), (torch.float32, *INTEGERS)
# What torch or ONNX Runtime answers differs in the last bits.
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 4e-3, "atol": 4e-3}}
EXACT = {"rtol": 0.0, "atol": 0.0}


@dataclass(frozen=True)
class Operator:
    """A function of one or two tensors [rows, 4].

    Attributes:
        function: The function.
        dtypes: What it takes.
        exact: Whether it has one right answer to the last bit.
    """

    function: Callable[..., Tensor]
    dtypes: Sequence[torch.dtype]
    exact: bool = True

    @property
    def count(self) -> int:
        """How many tensors it takes."""
        return self.function.__code__.co_argcount


def _positions(x: Tensor) -> Tensor:
    return (torch.arange(x.shape[0]) // 2)[:, None].expand(-1, COLUMNS)


def _scattered(kind: str, include_self: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: x.scatter_reduce(0, _positions(x), y, kind, include_self=include_self)


OPERATORS: Mapping[str, Operator] = {
    "times 2.5": Operator(lambda x: torch.ops.aten.mul.Scalar(x, 2.5), INT),
    "floor divide by 3": Operator(lambda x: torch.div(x, 3, rounding_mode="floor"), F32_INT),
    "truncate divide by -3": Operator(lambda x: torch.div(x, -3, rounding_mode="trunc"), INTEGERS),
    "floor divided by -3": Operator(lambda x: torch.floor_divide(x, -3), F32_INT),
    "remainder by -3": Operator(lambda x: torch.remainder(x, -3), F32_INT),
    "clamp": Operator(lambda x: x.clamp(-2, 3), NUMBERS),
    "clamp above": Operator(lambda x: x.clamp(max=1), NUMBERS),
    "clamp below": Operator(lambda x: x.clamp(min=2), NUMBERS),
    "sorted": Operator(lambda x: x.sort(1)[0], NUMBERS),
    "sorted down": Operator(lambda x: x.sort(0, descending=True)[0], NUMBERS),
    "order": Operator(lambda x: torch.sort(x, dim=1, stable=True)[1], NUMBERS),
    "order down": Operator(lambda x: torch.sort(x, dim=1, stable=True, descending=True)[1], NUMBERS),
    # torch promises nothing about the indices of equal elements
    "greatest 3": Operator(lambda x: x.topk(3, 1)[0], NUMBERS),
    "least 3": Operator(lambda x: x.topk(3, 1, largest=False)[0], NUMBERS),
    "greatest": Operator(lambda x: x.amax(0), NUMBERS),
    "greatest of all": Operator(lambda x: x.max(), NUMBERS),
    "least of all": Operator(lambda x: x.amin((0, 1), keepdim=True), NUMBERS),
    "least": Operator(lambda x: x.min(1, keepdim=True)[0], NUMBERS),
    "where the greatest is": Operator(lambda x: x.max(1)[1], NUMBERS),
    "first greatest": Operator(lambda x: x.argmax(1, keepdim=True), NUMBERS),
    "first greatest of all": Operator(lambda x: x.argmax(), NUMBERS),
    "first least": Operator(lambda x: x.argmin(0), NUMBERS),
    "repeated": Operator(lambda x: x[:1].repeat_interleave(x.shape[0], 0), F32_INT),
    "scattered sum": Operator(_scattered("sum", False), INTEGERS),
    "scattered greatest": Operator(_scattered("amax", False), F32_INT),
    "scattered least": Operator(_scattered("amin", True), F32_INT),
    "scattered mean": Operator(_scattered("mean", True), F32, exact=False),
    "half scattered": Operator(lambda x, y: x.scatter_add(0, _positions(x), y), (torch.float16,), exact=False),
    "sum of integers": Operator(lambda x: x.sum(0), INT),
    "product of integers": Operator(lambda x: x.prod(1), INT),
    "count": Operator(lambda x: x.sum(1), BOOL),
    "angle": Operator(lambda x, y: torch.atan2(x, y), F32, exact=False),
}


class Net(torch.nn.Module):
    """Calls each operator once."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        super().__init__()
        self.operators = operators

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [each.function(*(x, y)[: each.count]) for each in self.operators.values()]


_SPECIAL = (torch.nan, torch.inf, -torch.inf, -0.0, 0.5, 2.5)


def draw(dtype: torch.dtype, rows: int, *, special: bool = True) -> Tensor:
    """Few different numbers, and if `special`: NaN, infinities, halves, the ends of integers."""
    shape = (rows, COLUMNS)
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    numbers = torch.randint(-5, 6, shape).to(dtype)
    if not special:
        return numbers / 4 if dtype.is_floating_point else numbers
    ends = _SPECIAL if dtype.is_floating_point else (torch.iinfo(dtype).max, torch.iinfo(dtype).min + 1, 2**30 + 1)
    chosen = torch.tensor(ends, dtype=dtype)[torch.randint(0, len(ends), shape)]
    return torch.where(torch.rand(shape) < 0.3, chosen, numbers)


def differences(net: Net, inputs: tuple[Tensor, Tensor], answers: Sequence[Tensor]) -> Iterator[str]:
    for (name, operator), answer, expected in zip(net.operators.items(), answers, net(*inputs), strict=True):
        tolerance = EXACT if operator.exact or expected.dtype not in TOLERANCES else TOLERANCES[expected.dtype]
        try:
            assert_close(answer, expected, **tolerance, equal_nan=True)
        except AssertionError as error:
            yield f"{name} of {inputs}: {error}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_answer_like_torch_at_every_size_and_with_special_numbers(dtype: torch.dtype) -> None:
    net = Net({name: each for name, each in OPERATORS.items() if dtype in each.dtypes})
    sizes = {"x": {0: "rows[1:40]"}, "y": {0: "rows"}}
    model = checked(convert_spec(ExportSpec(net, (draw(dtype, 4), draw(dtype, 4)), dynamic_shapes=sizes)))
    session = session_of(model)
    for rows in (1, 2, 5, 8, 40):
        inputs = draw(dtype, rows), draw(dtype, rows)
        assert not list(differences(net, inputs, run(session, inputs)))
    # ONNX's own evaluator: what it makes of NaN and of the ends of integers is NumPy's choice.
    inputs = draw(dtype, 5, special=False), draw(dtype, 5, special=False)
    assert not list(differences(net, inputs, run_reference(model, inputs)))
