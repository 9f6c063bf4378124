"""Operators that cannot travel are named before anything is traced or compiled; tests/gallery/operators.py has more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exportkit.errors import OperatorNotExportableError
from exportkit.export.trace.preflight import check_model, check_operators, graph_operators, qualified_name
from exportkit.libraries import load_library
from tests.export.function_models import CPU, FunctionModel
from tests.fixtures import stable_library


@pytest.fixture(scope="session")
def ops() -> torch._ops._OpNamespace:
    """The operators of probe_ops.cpp, with what Python adds to them."""
    library = stable_library.build(Path(__file__).with_name("probe_ops.cpp"))
    load_library(library, defines=["exportkit_probe"])
    fakes: dict[str, Callable[..., Tensor]] = {
        "good": torch.empty_like,
        "wrong_dtype": lambda x: torch.empty_like(x, dtype=torch.float64),
        "wrong_strides": lambda x: x.new_empty(x.shape[::-1]).T,
        "python_kernel": torch.empty_like,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"exportkit_probe::{name}", fake)
    torch.library.impl("exportkit_probe::python_kernel", "CPU", torch.clone)
    return torch.ops.exportkit_probe


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_strides", r"it says strides \[1, 3\], the kernel returned \[4, 1\]"),
        ("twice_", r"::twice_ .* returns memory of an argument.*\n.*twice_\(Tensor\(a!\) x\) -> \(\)`"),
        ("view", r"exportkit_probe::view .* returns memory of an argument.*\n.*Return a copy"),
        ("split_", r"exportkit_probe::split_ .* a list beside other results.*\n.*one list of all of them"),
        ("largest", r"exportkit_probe::largest .* returns float, of which"),
    ],
)
def test_an_operator_that_cannot_travel_is_named_with_what_to_do(ops, name: str, message: str) -> None:
    with pytest.raises(OperatorNotExportableError, match=message) as caught:
        check_model(lambda: getattr(ops, name)(torch.rand(3, 4)), CPU)
    assert "test_preflight.py" in caught.value.message


def test_an_operator_that_only_writes_into_an_argument_needs_no_fake_kernel(ops) -> None:
    x, out = torch.rand(3, 4), torch.empty(3, 4)
    check_model(lambda: ops.write(x, out), CPU)
    assert torch.equal(out, x)


def test_an_operator_of_a_graph_that_returns_a_size_is_refused(ops) -> None:
    torch.library.register_fake("exportkit_probe::count", lambda x: torch.library.get_ctx().new_dynamic_size())
    with pytest.raises(OperatorNotExportableError, match="count returns SymInt, and AOTInductor cannot compile that"):
        check_operators({"exportkit_probe::count": ops.count.default}, CPU)


def test_an_operator_in_python_of_a_traced_graph_is_refused(ops) -> None:
    with pytest.raises(OperatorNotExportableError, match=r"::python_kernel is implemented in Python.*\n.*model itself"):
        check_operators({"exportkit_probe::python_kernel": ops.python_kernel.default}, CPU)


def test_an_operator_whose_schema_alone_is_in_python_passes(ops) -> None:
    torch.library.define("exportkit_probe::schema_in_python", "(Tensor x) -> Tensor")
    torch.library.register_fake("exportkit_probe::schema_in_python", torch.empty_like)
    x = torch.rand(3, 4)
    assert torch.equal(check_model(lambda: ops.schema_in_python(x), CPU), x)


def flow(name: str, body: Callable[[Tensor], Tensor], x: Tensor) -> object:
    """Runs `body` inside one of torch's operators for control flow."""
    from torch._higher_order_ops.map import map as map_rows
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    if name == "cond":
        return torch.cond(x.sum() > 0, body, torch.neg, (x,))
    if name == "while_loop":
        return while_loop(lambda n, _: n < 2, lambda n, x: (n + 1, body(x)), (torch.tensor(0), x))
    if name == "scan":
        return scan(lambda carry, row: (carry + row, body(row)), torch.zeros_like(x[0]), x)
    return map_rows(body, x)


@pytest.mark.parametrize("name", ["cond", "while_loop", "scan", "map"])
def test_operators_inside_control_flow_are_checked_like_others(ops, name: str) -> None:
    x = torch.rand(3, 4)
    answer = check_model(lambda: flow(name, ops.good, x), CPU)
    torch.testing.assert_close(answer, flow(name, ops.good, x))
    with pytest.raises(OperatorNotExportableError, match=r"exportkit_probe::wrong_dtype.* is wrong about output 0"):
        check_model(lambda: flow(name, ops.wrong_dtype, x), CPU)


def test_the_operators_of_a_graph_are_found_and_checked(ops) -> None:
    program = torch.export.export(FunctionModel(lambda x: ops.good(x) + 1), (torch.rand(3),))
    found = graph_operators(program.graph_module)
    assert list(found) == ["exportkit_probe::good"]
    check_operators(found, CPU)
    with pytest.raises(OperatorNotExportableError, match="without_fake"):
        check_operators({qualified_name(ops.without_fake.default): ops.without_fake.default}, CPU)
