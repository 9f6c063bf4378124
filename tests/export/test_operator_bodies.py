"""Operators that Python implements are replaced by their bodies, or refused with the line that cannot be traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from exportkit.errors import ExportError, OperatorNotExportableError
from tests.export.function_models import spec_of, traced

NAMESPACE = "exportkit_bodies"
ops = getattr(torch.ops, NAMESPACE)
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def in_python(schema: str, *keys: str) -> Callable[[Callable[..., object]], None]:
    """Defines an operator with kernels in Python, as custom_op does, whose first call imports torch's compiler."""
    _LIBRARY.define(schema)

    def register(body: Callable[..., object]) -> None:
        for key in keys or ("CompositeExplicitAutograd",):
            _LIBRARY.impl(schema.partition("(")[0], body, key)

    return register


@in_python("sine(Tensor x) -> Tensor", "CPU")
def _(x: Tensor) -> Tensor:
    return x.sin() * 2


torch.library.register_fake(f"{NAMESPACE}::sine", torch.empty_like)


@in_python("implicit(Tensor x) -> Tensor", "CompositeImplicitAutograd")
def _(x: Tensor) -> Tensor:
    return ops.sine(x) + 1


@in_python("nested(Tensor x) -> Tensor")
def _(x: Tensor) -> Tensor:
    return ops.implicit(x) * 3


@in_python("add_(Tensor(a!) x, Tensor y) -> ()")
def _(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@in_python("two_bodies(Tensor x) -> Tensor")
def _(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


_LIBRARY.impl("two_bodies", torch.neg, "CPU")


@in_python("branch(Tensor x) -> Tensor")
def _(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 4 else x * 3


@in_python("by_value(Tensor x) -> Tensor")
def _(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


@in_python("in_float32(Tensor x, Tensor y) -> Tensor", "CPU")
def _(x: Tensor, y: Tensor) -> Tensor:
    assert (x.dtype, y.dtype) == (torch.float32, torch.float32)
    return x @ y


torch.library.register_fake(f"{NAMESPACE}::in_float32", lambda x, y: x.new_empty(x.shape[0], y.shape[1]))
torch.library.register_autocast(f"{NAMESPACE}::in_float32", "cpu", torch.float32)


@in_python("by_address(Tensor x) -> Tensor")
def _(x: Tensor) -> Tensor:
    return x * (x.data_ptr() != 0)


@in_python("greatest(Tensor x) -> float")
def _(x: Tensor) -> float:
    return x.max().item()


@torch.library.custom_op(f"{NAMESPACE}_custom::scaled", mutates_args={"out"})
def scaled(x: Tensor, by: float, out: Tensor) -> Tensor:
    out.copy_(x)
    return out.mul(by)


class Calls(nn.Module):
    """Calls an operator between others."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.linear(x)) + 1


def in_place(x: Tensor) -> Tensor:
    rows = x.clone()
    ops.add_(rows[:1], x[:1])
    return rows


def by_custom_op(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    return scaled(x, 2.0, out) + out


def in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: ops.sine(x), lambda x: -x, (x,))


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = x @ x.mT
        return ops.in_float32(given, given) @ x


def called_by(call: Callable[[Tensor], Tensor]) -> tuple[set[str], list[str]]:
    """Traces a model, compares it with eager, and returns what its program calls and what was said."""
    said: list[str] = []
    result = traced(spec_of(Calls(call).eval(), torch.randn(3, 4), shapes={"x": {0: "batch[1:8]"}}), said)
    assert result.operators == ()
    graphs = [m for m in result.methods[0].program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return {str(node.target) for graph in graphs for node in graph.graph.nodes}, said


@pytest.mark.slow_but("nested", "in_place", "custom_op")
@pytest.mark.parametrize(
    ("call", "expected", "replaced"),
    [
        (ops.sine, "aten.sin.default", f"{NAMESPACE}::sine"),
        (ops.nested, "aten.sin.default", f"{NAMESPACE}::implicit, {NAMESPACE}::nested, {NAMESPACE}::sine"),
        (ops.two_bodies, "aten.neg.default", f"{NAMESPACE}::two_bodies"),
        (in_place, "aten.add_.Tensor", f"{NAMESPACE}::add_"),
        (by_custom_op, "aten.copy_.default", f"{NAMESPACE}_custom::scaled"),
        (in_a_branch, "aten.sin.default", f"{NAMESPACE}::sine"),
    ],
    ids=["one", "nested", "of_the_device", "in_place", "custom_op", "in_a_branch"],
)
def test_an_operator_in_python_is_replaced_by_its_body(
    call: Callable[[Tensor], Tensor], expected: str, replaced: str
) -> None:
    called, said = called_by(call)
    assert expected in called
    assert f"replacing operators in Python by their bodies: {replaced}" in said


def test_under_autocast_a_body_computes_in_the_dtype_of_the_operators_rule() -> None:
    model, x = Calls(under_autocast).eval(), torch.randn(3, 4)
    program = traced(spec_of(model, x)).methods[0].program
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=0)


def test_a_body_that_branches_on_a_declared_size_is_refused_with_its_line() -> None:
    with pytest.raises(ExportError, match=r"`batch` \(x:0\).*\n.*test_operator_bodies.py:\d+ .* needs x:0 <= 4"):
        called_by(ops.branch)


@pytest.mark.parametrize(
    ("call", "operator", "why"),
    [
        (ops.by_value, "by_value", r"branches on the value of a tensor at test_operator_bodies.py:\d+ "),
        (lambda x: x * ops.greatest(x), "greatest", r"needs a number from a tensor"),
        (ops.by_address, "by_address", r"passes a tensor to code that is not .*Cannot access data pointer[^']*\n"),
    ],
)
def test_a_body_that_cannot_be_traced_is_named_with_what_it_does(
    call: Callable[[Tensor], Tensor], operator: str, why: str
) -> None:
    with pytest.raises(
        OperatorNotExportableError, match=rf"operator {NAMESPACE}::{operator} \(called at .* is implemented.*{why}"
    ):
        called_by(call)
