"""Reductions of any number of rows and columns are as accurate as eager's, whatever loops Inductor makes of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.nn import functional
from torch.torch_version import TorchVersion

from exportkit.accuracy import allowed_error, measure_error, typical_magnitude
from exportkit.export.cpu_isas import default_cpu_isa
from exportkit.package.manifest import Accuracy
from tests.export.compiled_code import compile_code, kernels_of

pytestmark = pytest.mark.slow

Reduction = Callable[[Tensor], Tensor]


def check(names: Iterable[str], found: Any, eager: Any, wide: Any, of: str, *, times: float, more: bool) -> None:
    """An error is at most so many `times` eager's, or a rounding where that is greater; with `more`, their sum."""
    for how, ours, its, reference in zip(names, found, eager, wide, strict=True):
        if not its.dtype.is_floating_point:
            assert torch.equal(ours, its), f"{how} of {of}"
            continue
        floor = allowed_error(Accuracy(rms=0, greatest=0), str(its.dtype).removeprefix("torch.")).greatest
        typical = typical_magnitude(reference)
        eagers = times * measure_error(reference, its, typical=typical).size.greatest
        allowed = eagers + floor if more else max(eagers, floor)
        error = measure_error(reference, ours, typical=typical).size.greatest
        assert error <= allowed, f"{how} of {of}: {error:.3g}, allowed are {allowed:.3g}"


# --- long sums --------------------------------------------------------------------------------------------------------

# Of rows with 18 columns.
SUMS: dict[str, Reduction] = {
    "columns": lambda x: x.sum(0),
    "few columns": lambda x: x[:, :3].contiguous().sum(0),
    "columns of a vector": lambda x: x[:, :8].contiguous().mean(0),
    "columns apart": lambda x: x[:, ::2].sum(0),
    "one column": lambda x: x[:, 0].sum(),
    "all": lambda x: x.sum(),
    "rows": lambda x: (x.t().contiguous() + 1).sum(1),
    "outer dimensions": lambda x: x.view(-1, 3, 6).sum((0, 2)),
    "inner dimensions": lambda x: x.view(-1, 6, 3).transpose(0, 1).mean((1, 2)),
    "fused": lambda x: (x.sigmoid() * x).sum(0).sqrt() + x[0],
    "magnitudes": lambda x: torch.linalg.vector_norm(x, 1, 0),
    "squares": lambda x: x.norm(dim=0),
    "exponentials": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0),
    "products": lambda x: torch.einsum("ni,ni->i", x, x),
    "variance": lambda x: x.var(0),
    "variance apart": lambda x: x[:, ::2].var(0),
    "deviation of all": lambda x: x.std(),
    "layer": lambda x: functional.layer_norm(x.t().contiguous(), (x.shape[0],)),
    "batch": lambda x: functional.batch_norm(x, None, None, training=True),
    "short": lambda x: x.view(-1, 9).sum(1).view(-1, 2).sum(0),
}
NOT_OF_EQUAL = {"variance", "variance apart", "deviation of all", "layer", "batch"}  # 0, or divided by it


def variances(x: Tensor) -> list[Tensor]:
    return [x.var(-1), x.t().contiguous().var(0), x.std(), functional.gelu(x).var(-1), torch.var_mean(x, 1)[0]]


class Sums(torch.nn.Module):
    """All that is proved here. One program has it all: a compiler spends most of its time on headers."""

    def forward(self, float32: Tensor, bfloat16: Tensor, float64: Tensor, noise: Tensor) -> dict[str, list[Tensor]]:
        return {
            "float32": [how(float32) for how in SUMS.values()],
            "bfloat16": [how(bfloat16) for how in SUMS.values()],
            "float64": [float64.sum(0)],
            "noise": variances(noise),
        }


EXAMPLES = {
    "float32": torch.rand(40, 18),
    "bfloat16": torch.rand(40, 18).bfloat16(),
    "float64": torch.rand(40, 3, dtype=torch.float64),
    "noise": torch.rand(8, 40),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Tensor], list[Tensor]]:
    """Returns the compiled results for one of the inputs, by its name."""
    sizes = {name: {0: Dim(f"half_{name}", min=1, max=1 << 20) * 2} for name in ("float32", "bfloat16", "float64")}
    sizes["noise"] = {1: Dim("elements", min=2, max=1 << 20)}
    program = torch.export.export(Sums(), tuple(EXAMPLES.values()), dynamic_shapes=sizes)
    package = compile_code(program, tmp_path_factory.mktemp("sums"), **{"cpp.dynamic_threads": True})
    run: Any = torch._inductor.aoti_load_package(str(package))
    return lambda name, x: run(*{**EXAMPLES, name: x}.values())[name]


@pytest.mark.parametrize("values", ["equal", "of two values", "random"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_sum_is_as_accurate_as_eager(compiled: Any, dtype: str, values: str, threads: int) -> None:
    """Equal values are the worst: their rounding errors have one sign."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    names = [how for how in SUMS if values != "equal" or how not in NOT_OF_EQUAL]
    try:
        for rows in (10, 64, 66, 700, 4098, 30_000, 200_000):
            torch.manual_seed(rows)
            x = torch.rand(rows, 18) if values == "random" else torch.full((rows, 18), 0.1)
            if values == "of two values":
                x = x + 0.3 * (torch.arange(rows) % 2)[:, None]
            x = x.to(getattr(torch, dtype))
            found = dict(zip(SUMS, compiled(dtype, x), strict=True))
            eager, wide = ([SUMS[how](each) for how in names] for each in (x, x.double()))
            check(names, [found[how] for how in names], eager, wide, f"{rows} rows", times=1, more=False)
    finally:
        torch.set_num_threads(before)


def test_cascades_hold_numbers_of_64_bits(compiled: Any) -> None:
    rows = torch.full((200_000, 3), 0.1, dtype=torch.float64)
    (found, *_) = compiled("float64", rows)[0]
    assert found == pytest.approx(fsum(rows[:, 0].tolist()), rel=64 * 2**-52)


def test_a_variance_is_accurate_where_the_mean_is_many_deviations_away(compiled: Any) -> None:
    torch.manual_seed(0)
    for away in (0, 100, 1000, 10_000):
        x = torch.randn(8, 4096) + away
        for ours, eager, wide in zip(compiled("noise", x), variances(x), variances(x.double()), strict=True):
            typical = typical_magnitude(wide)
            allowed = allowed_error(measure_error(wide, eager, typical=typical).size, "float32").greatest
            assert measure_error(wide, ours, typical=typical).size.greatest <= allowed, f"{away} deviations away"


# --- several vectors of a row at a time -------------------------------------------------------------------------------

HERE = default_cpu_isa()
LONGER = ["x86-64-v4"] if torch.backends.cpu.get_cpu_capability() == "AVX512" else []  # vectors
GATHERS = TorchVersion(torch.__version__) >= "2.13"  # older ones do not say which columns are apart
COLUMNS = [7, 33, 200]
REDUCTIONS: dict[str, Reduction] = {
    "sum": lambda x: x.sum(0),
    "mean of a function": lambda x: (x.sigmoid() * x).mean(0),
    "variance": lambda x: x.var(0),
    "greatest": lambda x: x.amax(0),
    "place of the least": lambda x: x.argmin(0),
    "product": lambda x: (x + 0.5).clamp(0.9, 1.1).prod(0),
    "some": lambda x: torch.where(x > 0.5, x, 0).sum(0),
    "count": lambda x: (x > 0.5).sum(0),
    "any": lambda x: (x > 0.99).any(0),
    "softmax": lambda x: x.softmax(0),
    "apart": lambda x: x[:, ::2].sum(0),
    "backwards": lambda x: (x + x.flip(1)).sum(0),
    "middle": lambda x: x.view(-1, 4, x.shape[1]).sum(1),
    "turned": lambda x: x.t().contiguous().sum(1),
}


class Table(NamedTuple):
    """A table of some columns in the example, and whether the code takes any number of them."""

    dtype: torch.dtype
    columns: int
    varying: bool = False

    def of(self, rows: int, columns: int) -> Tensor:
        return torch.rand(rows, columns if self.varying else self.columns).to(self.dtype)


# One program has them all: a compiler spends most of its time on headers.
TABLES = [Table(torch.float32, columns) for columns in COLUMNS]
TABLES += [Table(torch.bfloat16, 33), Table(torch.bfloat16, 200), Table(torch.float64, 33)]
TABLES += [Table(torch.float32, 7, varying=True), Table(torch.float32, 200, varying=True)]


class Reductions(torch.nn.Module):
    def forward(self, tables: list[Tensor]) -> list[list[Tensor]]:
        return [[how(x) for how in REDUCTIONS.values()] for x in tables]


def compile_for(isa: str | None, tables: list[Table], folder: Path) -> Path:
    rows = Dim("quarter", min=1, max=1 << 20) * 4
    sizes = [
        {0: rows} | ({1: Dim(f"columns{i}", min=3, max=4096)} if table.varying else {})
        for i, table in enumerate(tables)
    ]
    examples = [table.of(8, table.columns) for table in tables]
    program = torch.export.export(Reductions(), (examples,), dynamic_shapes=(sizes,))
    return compile_code(program, folder, isa=isa, **{"cpp.dynamic_threads": True})


@pytest.mark.parametrize(
    ("isa", "tables"), [(HERE, TABLES), *((isa, TABLES[: len(COLUMNS)]) for isa in LONGER)], ids=[str(HERE), *LONGER]
)
def test_any_number_of_columns_agrees(isa: str | None, tables: list[Table], tmp_path: Path) -> None:
    program: Any = torch._inductor.aoti_load_package(str(compile_for(isa, tables, tmp_path)))
    for rows, columns in itertools.product((4, 64, 68, 1000), COLUMNS):
        torch.manual_seed(rows)
        given = [table.of(rows, columns) for table in tables]
        answers = zip(tables, program(given), Reductions()(given), Reductions()([x.double() for x in given]))
        for table, *results in answers:
            check(REDUCTIONS, *results, f"{rows} rows of {table}, {columns} columns", times=3, more=True)


def test_a_sum_takes_eight_vectors_of_a_row_at_a_time(tmp_path: Path) -> None:
    class Sums(torch.nn.Module):
        def forward(self, x: Tensor, half: Tensor) -> tuple[Tensor, ...]:
            return x.sum(0), x[:, ::2].sum(0), half.sum(0)

    inputs = (torch.rand(8, 1024), torch.rand(8, 1024).bfloat16())
    rows = {0: Dim("rows", min=2)}
    program = torch.export.export(Sums(), inputs, dynamic_shapes=(rows, rows))
    code = kernels_of(lambda: compile_code(program, tmp_path, isa="x86-64-v3"))
    assert len(re.findall(r"x0\+=static_cast<int64_t>\(64L\)", code)) == (3 if GATHERS else 2)
    assert "x0+=static_cast<int64_t>(8L)" not in code
