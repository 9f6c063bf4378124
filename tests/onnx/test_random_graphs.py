"""Random graphs answer in ONNX Runtime what they answer in torch, at every size and with every special number.

EXPORTKIT_ONNX_EXAMPLES=500 tries as many groups of graphs, which then differ from run to run.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from exportkit import ExportSpec
from tests.onnx.conversions import checked, convert_spec, run, run_reference, session_of, tensors_of
from tests.onnx.random_graphs import OPERATORS, Graph, Net, Step, draw, graphs

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("EXPORTKIT_ONNX_EXAMPLES", "0"))
ROWS = (1, 2, 5, 8)
LARGEST = 8

# What torch or ONNX Runtime answers differs in the last bits.
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 4e-3, "atol": 4e-3}}
EXACT = {"rtol": 0.0, "atol": 0.0}


def settings(examples: int) -> hypothesis.settings:
    """Always the same examples, or as many others as the environment asks for."""
    return hypothesis.settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


class Group(torch.nn.Module):
    """Several graphs, because making a model takes longer than translating an operator. They share no tensor."""

    def __init__(self, some: Sequence[Graph]) -> None:
        super().__init__()
        self.nets = [Net(graph) for graph in some]

    def forward(self, inputs: list[list[Tensor]]) -> list[list[Tensor]]:
        return [net(*given) for net, given in zip(self.nets, inputs)]


def drawn(some: Sequence[Graph], rows: int, *, special: bool) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(zlib.crc32(repr((some, rows, special)).encode()))
    return [[draw(d, rows, special=special, generator=generator) for d in graph.dtypes] for graph in some]


def group(some: Sequence[Graph]) -> ExportSpec:
    inputs = drawn(some, 4, special=False)
    shapes = {
        f"inputs.{i}.{j}": {0: f"rows[1:{LARGEST}]" if i == j == 0 else "rows"}
        for i in range(len(some))
        for j in (0, 1)
    }
    return ExportSpec(Group(some), (inputs,), dynamic_shapes=shapes)


def differences(some: Sequence[Graph], expected: list[list[Tensor]], answers: Sequence[Tensor]) -> Iterator[str]:
    given = iter(answers)
    for graph, results in zip(some, expected):
        for step, exact, result in zip(graph.steps, graph.exact, results):
            tolerance = EXACT if exact or result.dtype not in TOLERANCES else TOLERANCES[result.dtype]
            try:
                assert_close(next(given), result, **tolerance, equal_nan=True)
            except AssertionError as error:
                yield f"{step.operator} in {graph}: {error}"


@settings(8)
@hypothesis.given(st.lists(graphs(), min_size=1, max_size=4))
def test_onnx_runtime_answers_like_torch_at_every_size(some: list[Graph]) -> None:
    spec = group(some)
    session = session_of(checked(convert_spec(spec)))
    for rows in ROWS:
        for special in (False, True):
            inputs = drawn(some, rows, special=special)
            expected = spec.model(inputs)
            answers = run(session, tensors_of(inputs))
            assert not list(differences(some, expected, answers)), (rows, special)


def test_the_reference_evaluator_of_onnx_agrees_about_every_operator() -> None:
    # It knows neither torch nor ONNX Runtime. What it makes of NaN and of the ends of integers is NumPy's choice.
    some = [Graph((op.dtypes[0],) * 2, (Step(name, (0, 1)[: op.count]),)) for name, op in OPERATORS.items()]
    spec = group(some)
    inputs = drawn(some, 5, special=False)
    answers = run_reference(checked(convert_spec(spec)), tensors_of(inputs))
    assert not list(differences(some, spec.model(inputs), answers))
