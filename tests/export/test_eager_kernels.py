"""Operators that compiled code leaves to eager's kernels, and options that exportkit keeps to itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.exc import LoweringException

from exportkit.errors import ExportError, UsageError
from exportkit.export.compile.compile_failure import failed_operator
from exportkit.export.compile.compile_plan import read_inductor_config
from exportkit.export.compile.eager_kernels import _is_callable, read_eager_kernels, with_tensors


def test_names_of_operators_are_read_and_wrong_ones_refused() -> None:
    assert read_eager_kernels(["aten.amin", "aten::div.Tensor", "amin"]) == (
        "aten.amin.default",
        "aten.amin.out",
        "aten.div.Tensor",
    )
    assert read_eager_kernels(["aten.amin", "aten"]) == ("aten",)
    with pytest.raises(UsageError, match=r"no operator 'aten\.amim'(?s:.*)aten\.amin"):
        read_eager_kernels(["aten.amim"])
    with pytest.raises(UsageError, match="no overload 'Tenzor'"):
        read_eager_kernels(["aten.div.Tenzor"])


@pytest.mark.parametrize(
    ("dtype", "number", "made"),
    [
        (torch.bfloat16, 3.0, torch.float64),
        (torch.int8, 3, torch.int64),
        (torch.int8, 3.0, torch.float32),
        (torch.float32, 2, torch.int64),
    ],
)
def test_a_kernel_gets_tensors_for_numbers_and_answers_the_same(
    dtype: torch.dtype, number: float, made: torch.dtype
) -> None:
    class Divide(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / number

    x = torch.arange(-8, 8).to(dtype)
    module: Any = torch.export.export(Divide(), (x,)).module()
    with_tensors(module, read_eager_kernels(["aten.div.Tensor"]))
    (full,) = [node for node in module.graph.nodes if node.target is torch.ops.aten.full.default]
    assert full.kwargs["dtype"] is made
    answer = module(x)
    assert answer.dtype is Divide()(x).dtype
    assert torch.equal(answer, Divide()(x))


def test_a_conversion_is_compiled_even_where_all_kernels_are_eagers() -> None:
    """torch 2.11's C interface to kernels gives it another dtype."""

    class Narrow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.half() + x

    graph = torch.export.export(Narrow(), (torch.ones(3),)).run_decompositions().graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert torch.ops.aten._to_copy.default in {node.target for node in nodes}
    assert {node.target for node in nodes if _is_callable(node)} == {torch.ops.aten.add.Tensor}


@pytest.mark.parametrize("config", ["cpp.simdlen=1", "cpp.simdlen=8"])
def test_a_vectors_length_can_only_be_one(config: str) -> None:
    name, value = config.split("=")
    if value == "1":
        assert read_inductor_config({name: value}) == {"cpp.simdlen": 1}
    else:
        with pytest.raises(UsageError, match="exportkit sets it"):
            read_inductor_config({name: value})


def test_the_operator_that_the_compiler_refused_is_read_from_its_error() -> None:
    trace = '  File "/home/me/model.py", line 7, in forward\n    y = torch.relu(x)\n'
    cause = LoweringException(ValueError("no"), torch.ops.aten.relu.default, [], {}, stack_trace=trace)
    error = ExportError("AOTInductor could not compile the program")
    error.__cause__ = cause
    found = failed_operator(error)
    assert found is not None
    assert found.name == "aten.relu.default"
    assert found.where.startswith("model.py:7 in forward")
    assert failed_operator(ValueError("no")) is None
