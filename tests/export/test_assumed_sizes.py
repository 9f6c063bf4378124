"""No size is assumed: conditions follow from ranges, code takes no size for the example's, and 0 rows are answered."""

from __future__ import annotations

import importlib
import itertools
import operator
from pathlib import Path
from types import ModuleType

import pytest
import sympy
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors
from torch import Tensor
from torch._inductor import decomposition
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn import functional
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, ModularIndexing

from exportkit.errors import ExportError, RefusedValueError
from exportkit.export.artifact import export_aoti
from exportkit.export.compile.assumed_sizes import AssumedSizeError, no_assumed_sizes
from exportkit.export.compile.compile_failure import UncompiledError, described
from exportkit.export.export_options import TraceOptions
from exportkit.export.sizes.tried_sizes import Ranges, counterexamples, holds
from exportkit.libraries import load_library
from exportkit.package.archive import PackageReader
from exportkit.package.compiled_with import compiled_with
from exportkit.packaging import PackOptions, build_package
from exportkit.reference_model import ReferenceModel
from exportkit.runtime.loader import load
from exportkit.verify.options import VerifyOptions
from tests.artifacts import ROOT, artifact
from tests.export.function_models import FunctionModel, spec_of, traced
from tests.fixtures import stable_library

# --- conditions on sizes ---------------------------------------------------------------------------------------------


N, M, B = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "nmb")
SMALL: Ranges = {N: (1, 100), M: (1, 100), B: (1, 8)}
WIDE: Ranges = {N: (1, 2**31 - 1), M: (1, 2**20), B: (1, 64)}

TRUE = [
    sympy.Eq(Min(8 * N + 8, 16 * N + 16), 8 * N + 8),
    sympy.Eq(Min(64 * N, 256 * N), 64 * N),
    sympy.Ne(Min(8 * N + 8, 16 * N + 16), 64 * N + 64),
    32 * N + 4 * (8 * B - 1) * Min(8 * N + 8, 64 * N + 64) + 32 <= 256 * B * (N + 1),
    sympy.Eq(FloorDiv(N, 2) + FloorDiv(N + 1, 2), N),
    sympy.Eq(N - 2 * FloorDiv(N, 2), Mod(N, 2)),
    sympy.Eq(Mod(N + Mod(8 - Mod(N, 8), 8), 8), 0),
    32 * FloorDiv(N + 31, 32) < N + 32,
    sympy.Eq(FloorDiv(6 * M * N, 2 * N), 3 * M),
    sympy.Eq(Min(N, M * N), N),
    sympy.Eq(ModularIndexing(16 * N + 3, 4, 4), 0),
    sympy.And(N >= 1, sympy.Or(N < M, N >= M, sympy.Eq(B, 0))),
    Max(N, M) >= N,
]
UNTRUE = [
    sympy.Eq(Mod(N, 2), 0),
    N >= 2,
    N < 100,
    sympy.Eq(Min(N, M), N),
    sympy.Eq(FloorDiv(N, 2) * 2, N),
    N * B <= 700,
]


@pytest.mark.parametrize("condition", TRUE, ids=str)
@pytest.mark.parametrize("ranges", [SMALL, WIDE], ids=["small", "wide"])
def test_what_follows_from_the_ranges_holds(condition: sympy.Basic, ranges: Ranges) -> None:
    assert holds(condition, ranges)
    assert not counterexamples(condition, ranges)


@pytest.mark.parametrize("condition", UNTRUE, ids=str)
@pytest.mark.parametrize("ranges", [SMALL, WIDE], ids=["small", "wide"])
def test_what_fails_somewhere_is_untrue_there(condition: sympy.Basic, ranges: Ranges) -> None:
    assert not holds(condition, ranges)
    found = counterexamples(condition, ranges)
    assert found
    assert all(condition.xreplace(dict(each)) == sympy.false for each in found)


def test_a_condition_on_a_size_without_a_range_does_not_hold() -> None:
    assert not holds(sympy.Symbol("u0", integer=True) >= 0, SMALL)


def _numbers() -> st.SearchStrategy[sympy.Expr]:
    leaves = st.one_of(st.sampled_from([N, M]), st.integers(0, 9).map(sympy.Integer))

    def grow(inner: st.SearchStrategy[sympy.Expr]) -> st.SearchStrategy[sympy.Expr]:
        two = st.tuples(inner, inner)
        kinds = [operator.add, operator.mul, operator.sub, Min, Max]
        joined = st.builds(lambda kind, pair: kind(*pair), st.sampled_from(kinds), two)
        divided = st.builds(
            lambda kind, base, divisor: kind(base, divisor),
            st.sampled_from([FloorDiv, Mod]),
            inner.filter(lambda base: base.is_nonnegative),
            st.one_of(st.integers(1, 6).map(sympy.Integer), st.just(N + 1)),
        )
        return st.one_of(joined, divided)

    return st.recursive(leaves, grow, max_leaves=6)


@settings(max_examples=150, deadline=None)
@example(Min(Max(N, 2), Max(N, 7)), N, sympy.Eq)
@given(_numbers(), _numbers(), st.sampled_from([sympy.Eq, sympy.Ne, sympy.Le, sympy.Lt]))
def test_it_holds_where_every_size_is_computed_alone(left: sympy.Expr, right: sympy.Expr, kind: type) -> None:
    box: Ranges = {N: (1, 7), M: (2, 6)}
    condition = kind(left, right)
    points = [dict(zip((N, M), map(sympy.Integer, at))) for at in itertools.product(range(1, 8), range(2, 7))]
    assert holds(condition, box) is all(condition.xreplace(point) == sympy.true for point in points)


# --- code ------------------------------------------------------------------------------------------------------------


class Pools(torch.nn.Module):
    """Inductor keeps the sizes of the example in each of these, but the last: there it only finds that two differ."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = (torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.Conv2d(8, 32, 3, stride=2, padding=1))
        self.patches = torch.nn.Sequential(*convolutions, torch.nn.GroupNorm(8, 32))

    def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        pools = functional.adaptive_avg_pool2d(x, (5, 9)), functional.adaptive_max_pool2d(x, (5, 9))
        return *pools, functional.glu(x, -1), self.patches(image).flatten(2).transpose(1, 2)


@pytest.mark.slow
def test_an_operator_whose_size_inductor_fixes_is_left_to_eager(tmp_path: Path) -> None:
    said, out = list[str](), tmp_path / "pools.pt2"
    pools = Pools()
    sizes = {"x": {0: "batch[1:64]", 2: "h[8:80]", 3: "2*w[4:40]"}, "image": {2: "2*rows[2:4]", 3: "2*columns[2:4]"}}
    spec = spec_of(pools, torch.rand(2, 3, 22, 32), torch.rand(2, 3, 4, 6), shapes=sizes)
    export_aoti(spec, out, TraceOptions(cases=1, edge_cases=False), progress=said.append)
    kernels = ("_adaptive_avg_pool2d", "adaptive_max_pool2d", "glu")
    for name in kernels:
        assert any(f"with eager's kernel of aten.{name}.default, test_assumed_sizes.py:" in line for line in said), said
    with PackageReader(out) as reader:
        left = compiled_with(reader, reader.manifest.targets[0]).eager_kernels
    places = [name.removeprefix("_") for name in kernels]
    assert sorted(left) == [f"aten.{name}.default@{name}" for name in places]
    with load(out, device="cpu") as model:
        for rows, columns in ((2, 2), (2, 4), (4, 2), (4, 4)):
            x, image = torch.rand(5, 3, 11 * rows, 20 * columns), torch.rand(2, 3, 2 * rows, 2 * columns)
            torch.testing.assert_close(model(x, image), pools(x, image))


def test_a_size_that_no_kernel_of_eager_helps_is_refused_with_its_line() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.glu.default, (graph.placeholder("x"),))
    node.meta["stack_trace"] = '  File "/models/net.py", line 7, in forward\n    y = x.one(2)\n'
    error = AssumedSizeError("x:0 == 2")
    failed = UncompiledError(str(error), error.refusal(described(node)), described(node), ["aten.glu.default@glu"])
    left = failed.left_to_eager(())
    assert left == ("aten.glu.default@glu",)
    with pytest.raises(ExportError, match=r"fixes a size .* at aten\.glu\.default, net.py:7.*only where x:0 == 2"):
        failed.left_to_eager(left)


def test_conditions_that_choose_a_layout_are_forgiven() -> None:
    model = torch.nn.Conv2d(3, 4, 3).requires_grad_(False)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.rand(2, 3, 8, 8),), dynamic_shapes=({0: batch},))
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    x = values["input"]
    with no_assumed_sizes(program):
        with pytest.raises(AssumedSizeError, match="only where input:0 < 30"):
            bool(x.shape[0] < 30)
        with pytest.raises(AssumedSizeError, match="only where input:0 == 2"):
            int(x.shape[0])
        assert x.shape[0] > 1
        assert not guard_or_false(x.shape[0] > 40)
        with pytest.raises(AssumedSizeError, match="only where input:0 <= 40"):  # this answer is used
            bool(x.shape[0] > 40)
        with pytest.raises(AssumedSizeError, match="only where input:0 < 40"):
            guard_or_false(x.shape[0] < 40)  # it takes the way of the example
        functional.conv2d(x, values["p_weight"])  # asks which of its kernels will compute it
        multiplied_out = getattr(decomposition.mm, "__wrapped__", decomposition.mm)
        multiplied_out(x[:, 0, 0, :1], x[:1, 0, 0])  # asks whether all is small; both ways are right for all sizes


def test_a_size_that_depends_on_values_may_be_of_any_range() -> None:
    program = torch.export.export(
        FunctionModel(lambda x: x[x > 0].exp()), (torch.rand(2),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    assert any(not range_.upper.is_Integer for range_ in program.range_constraints.values())
    x = next(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    with no_assumed_sizes(program):
        assert int(x.shape[0]) == 2  # nothing is declared of it


# --- sizes that depend on data ---------------------------------------------------------------------------------------


SOURCE = ROOT / "tests" / "export" / "kept_rows.cpp"


@pytest.fixture(scope="module")
def models() -> ModuleType:
    load_library(stable_library.build(SOURCE))
    return importlib.import_module("tests.export.kept_models")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("keep-of-two", 2), ("keep-any", 0)])
def test_a_package_answers_for_none_one_two_and_all_rows(name, least, models, tmp_path):
    eager = ReferenceModel(op_libraries=[stable_library.build(SOURCE)])
    options = PackOptions(VerifyOptions(against="cases", device="cpu", eager=eager), verify=True)
    _, report = build_package([artifact(name)], tmp_path / "kept.pt2", options)
    assert report is not None
    assert report.exit_code == 0
    with load(tmp_path / "kept.pt2") as model:
        for count in (0, 1, 2, 3, 33, 100):
            for kept in {0, 1, 2, count} if count >= least else ():
                if kept > count:
                    continue
                rows = torch.randn(count, 4)
                rows[:, 0] = torch.arange(count).clamp(max=max(kept - 1, 0))
                answer = model(rows, torch.full((count,), 1.0 if kept else -1.0))
                torch.testing.assert_close(answer, models.uses(rows[:kept], rows), equal_nan=True, rtol=1e-4, atol=1e-4)


def extremes(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The greatest and the least of the rows that it chooses."""
    chosen = rows[rows[:, 0] > 0]
    return chosen.max(), -chosen.min(), chosen.softmax(0).sum(0)


@pytest.mark.slow
def test_what_has_no_result_for_no_rows_is_refused_as_eager_refuses_it(tmp_path):
    rows = torch.rand(5, 4)
    export_aoti(spec_of(extremes, rows, shapes={"rows": {0: "n[1:9]"}}), tmp_path / "extremes.pt2")
    with load(tmp_path / "extremes.pt2") as model:
        torch.testing.assert_close(model(rows), extremes(rows))
        with pytest.raises(RuntimeError, match="numel\\(\\) == 0"):
            extremes(-rows)
        with pytest.raises(RefusedValueError, match=r"(max|min)\(\) of no elements"):
            model(-rows)


@pytest.mark.slow
def test_cases_have_none_one_two_and_all_rows(models):
    found = [
        (case.calls[0].sizes["n"], len(load_tensors(case.tensors)["0.output.0"]))
        for case in traced(models.spec(models.Rows(), 0)).cases
        if case.edge_case
    ]
    largest = max(rows for rows, _ in found)
    assert {(largest, kept) for kept in (0, 1, 2, largest)} <= {*found}


@pytest.mark.slow
def test_a_least_size_that_the_kernel_does_not_keep_to_is_refused_at_export(models):
    with pytest.raises(
        ExportError, match=r"refuses, at n=\d+, what eager answers: it was traced for u0 >= 2"
    ) as caught:
        traced(models.spec(models.KeepTwo(), 2))
    assert "new_dynamic_size(min=0)" in str(caught.value.hint)


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True], ids=["in float32", "in the float64 of the reference"])
def test_values_that_end_the_process_are_left_out(wide, models):
    said: list[str] = []
    cases = traced(models.spec(models.Fragile(wide), 2), said).cases
    assert any("that end eager's process" in line for line in said)
    assert any(case.edge_case for case in cases)
    assert not any("NaN in rows" in case.edge_case for case in cases)
