"""Programs that torch's own code computes wrongly, does not compile, or writes other operators for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.torch_version import TorchVersion

from exportkit.export.artifact import export_aoti
from exportkit.export.compile.inductor_changes import changed_inductor
from exportkit.export.compile.refusable_values import ATTENTION, refuse_in_attention
from exportkit.export.export_options import TraceOptions
from exportkit.runtime.loader import load
from tests.export.compiled_code import compile_code
from tests.export.function_models import spec_of, traced

_LIBRARY = torch.library.Library("exportkit_test_outs", "DEF")


def compiled_here(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """What a function answers when Inductor has compiled it in this process."""
    # As in packages: the number of threads is that of the machine that runs the code.
    options = {"cpp.dynamic_threads": True, "fx_graph_cache": False}
    with torch.no_grad(), changed_inductor():
        return torch.compile(function, options=options)(*inputs)


def sums(x: Tensor, rows: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
    """Sums whose places do not vary along a vector: a target of one element, in each dtype, and of one column."""
    one = x.new_zeros(1, 1).index_add(0, rows * 0, x)
    half = x.new_zeros(1, dtype=torch.bfloat16).index_add(0, rows * 0, (x[:, 0] * 0 + 1).bfloat16())
    whole = rows.new_zeros(1).scatter_add(0, rows * 0, rows)
    each = x.new_zeros(5).index_put((rows[:, None].expand_as(wide),), wide, accumulate=True)
    return one, half, whole, each


def test_vectors_are_added_to_one_element() -> None:
    """torch's own code fails in an assertion. 37 and 19 elements are no whole vectors."""
    inputs = torch.rand(37, 1), torch.arange(37) % 5, torch.rand(37, 19)
    torch.testing.assert_close(compiled_here(sums, *inputs), sums(*inputs))


def scaled(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Products and sums with factors that Inductor's patterns do not name."""
    one = torch.add(a @ b, x, alpha=0.25), torch.add(x, a @ b, alpha=0.25)
    return *one, torch.sub(a @ b, x, alpha=3), torch.addmm(x, a, b, beta=0.5, alpha=2).relu()


def test_no_factor_is_dropped() -> None:
    """torch's own code before 2.15 adds the whole tensor, pytorch#195442."""
    inputs = torch.rand(16, 16), torch.rand(16, 8), torch.rand(8, 16)
    torch.testing.assert_close(compiled_here(scaled, *inputs), scaled(*inputs))


def writes(new: Tensor, old: Tensor, one: Tensor, other: Tensor, long: Tensor, part: Tensor, x: Tensor) -> None:
    """One tensor takes another one's value; two change places; one takes a part."""
    before = new.clone(), one.clone(), other.clone(), long[2:5].clone()
    for to, value in zip((old, other, one, part), before, strict=True):
        to.copy_(value)
    new.copy_(new * 0.5 + x.sum(0))
    long.mul_(2)


def test_values_are_those_from_before_all_writes() -> None:
    """torch's own code gives a tensor what the other one has become."""
    found = [torch.rand(length) for length in (3, 3, 4, 4, 6, 3)]
    wanted, x = [tensor.clone() for tensor in found], torch.rand(5, 3)
    compiled_here(writes, *found, x)
    writes(*wanted, x)
    torch.testing.assert_close(found, wanted)


def columns(x: Tensor) -> tuple[Tensor, ...]:
    """The columns that differ lie one after the other in memory, and torch says that the rows do."""
    values, inverse, counts = torch.unique(x, dim=1, return_inverse=True, return_counts=True)
    return values[0] * 2, inverse, counts, values + 1, torch.unique(x, dim=0)


@pytest.mark.slow
def test_columns_that_differ_are_read_where_the_kernel_writes_them(tmp_path: Path) -> None:
    x = torch.tensor([[3.0, 1, 3, 2, 1], [0, 5, 0, 5, 5]])
    spec = spec_of(columns, x, shapes={"x": {0: "rows[2:9]", 1: "columns[2:40]"}})
    export_aoti(spec, tmp_path / "columns.pt2", TraceOptions(cases=1, edge_cases=False))
    with load(tmp_path / "columns.pt2", device="cpu") as model:
        for given in (x, torch.randint(0, 2, (3, 30)).float()):
            for one, other in zip(model(given), columns(given), strict=True):
                assert torch.equal(one, other)


class BestPath(torch.nn.Module):
    """Viterbi's algorithm: of the ways to each label the best, then back from the best label."""

    def __init__(self) -> None:
        super().__init__()
        self.change = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, scores: Tensor) -> Tensor:
        best, back = scores[:, 0], []
        for step in range(1, scores.shape[1]):
            reached, came = (best[:, :, None] + self.change).max(1)
            best = reached + scores[:, step]
            back.append(came)
        path = [best.argmax(-1)]
        for came in reversed(back):
            path.append(came.gather(1, path[-1][:, None])[:, 0])
        return torch.stack(path[::-1], 1)


@pytest.mark.slow
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="code for a CPU rounds so since torch 2.13")
def test_code_that_rounds_as_eager_finds_eagers_path(tmp_path: Path) -> None:
    """Eager rounds to ties in 16 bits: export says what makes the code round alike, and it does."""
    torch.manual_seed(0)
    model, scores, said = BestPath().bfloat16(), torch.randn(300, 4, 4).bfloat16(), list[str]()
    traced(spec_of(model, scores), said)
    advice = next(line for line in said if "numerically unstable in `0`" in line)
    found = re.search(r"--inductor-config (\w+)=True rounds each operator's result as eager does", advice)
    assert found is not None, advice
    program = torch.export.export(model, (scores,))
    compiled: Any = torch._inductor.aoti_load_package(str(compile_code(program, tmp_path, **{found[1]: True})))
    assert torch.equal(compiled(scores), model(scores))


@pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="torch has no such tag before 2.13")
def test_an_overload_with_the_tag_out_is_not_called_in_its_place() -> None:
    variants = pytest.importorskip("torch._library._out_variant")
    _LIBRARY.define("twice(Tensor x) -> Tensor")
    _LIBRARY.define("twice.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))
    operator = torch.ops.exportkit_test_outs.twice
    assert variants.to_out_variant(operator.default) is operator.out
    with changed_inductor():
        assert variants.to_out_variant(operator.default) is None
    assert variants.to_out_variant(operator.default) is operator.out


def test_what_a_library_taught_inductor_to_write_in_its_place_is_not_written() -> None:
    from torch._inductor import lowering  # imported late: it takes seconds

    _LIBRARY.define("thrice(Tensor x) -> Tensor")
    operator = torch.ops.exportkit_test_outs.thrice.default
    lowering.register_lowering(operator)(lambda x: x)
    taught = lowering.lowerings[operator]
    with changed_inductor():
        assert operator not in lowering.lowerings
        lowering.make_fallback(operator)  # as Inductor does where there is nothing
    assert lowering.lowerings.pop(operator) is taught
    assert operator not in lowering.fallbacks


# --- which blocks of an attention's mask are checked: all but those that never change --------------------------------


COUNTS, BLOCKS = torch.full((1, 1, 2), 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)


class Masked(nn.Module):
    """Attention whose mask has blocks of its own, or given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.blocks = nn.Buffer(COUNTS, persistent=False), nn.Buffer(BLOCKS, persistent=False)

    def forward(self, x: Tensor, counts: Tensor | None, blocks: Tensor | None) -> Tensor:
        counts = self.counts if counts is None else counts
        blocks = self.blocks if blocks is None else blocks
        answer: Tensor = flex_attention(x, x, x, block_mask=BlockMask.from_kv_blocks(counts, blocks))
        return answer


@pytest.mark.slow_but("constants0-None-None", "constants2-blocks1-counts1")
@pytest.mark.parametrize("counts", [None, COUNTS])
@pytest.mark.parametrize("blocks", [None, BLOCKS])
@pytest.mark.parametrize("constants", [{"counts", "blocks"}, {"blocks"}, set()])
def test_blocks_are_checked_unless_both_of_their_tensors_never_change(counts, blocks, constants):
    program = torch.export.export(Masked(), (torch.randn(1, 2, 256, 16), counts, blocks))
    module = program.module(check_guards=False)
    memory = module.graph.find_nodes(op="placeholder")[0]
    refuse_in_attention(module, memory, constants)
    (node,) = module.graph.find_nodes(op="call_function", target=ATTENTION)
    checked = [each.target is torch.ops.aten.index.Tensor for each in node.args[4][2:4]]
    never_change = counts is None and blocks is None and constants == {"counts", "blocks"}
    assert checked == [not never_change] * 2


class BranchesOverTurned(torch.nn.Module):
    """Branches over what Inductor writes with other strides than eager."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.norm(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y + 1, (turned,))


@pytest.mark.slow
def test_branches_read_their_operands_as_they_lie(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = BranchesOverTurned().eval(), torch.randn(2, 5, 8)
    sizes = ({0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("n", min=2, max=32)},)
    program = torch.export.export(model, (x,), dynamic_shapes=sizes)
    compiled: Any = torch._inductor.aoti_load_package(str(compile_code(program, tmp_path)))
    for rows in (x, torch.randn(8, 31, 8) + 1, torch.randn(1, 2, 8) - 1):
        torch.testing.assert_close(compiled(rows), model(rows))
