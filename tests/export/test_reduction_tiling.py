"""Reductions over rows read several vectors of a row at a time, and are right for every number of columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.torch_version import TorchVersion

from exportkit.accuracy import allowed_error, measure_error, typical_magnitude
from exportkit.export.cpu_isas import default_cpu_isa
from exportkit.package.manifest import Accuracy
from tests.export.compiled_code import compile_code, kernels_of

pytestmark = pytest.mark.slow

HERE = default_cpu_isa()
LONGER = ["x86-64-v4"] if torch.backends.cpu.get_cpu_capability() == "AVX512" else []  # vectors
GATHERS = TorchVersion(torch.__version__) >= "2.13"  # older ones do not say which columns are apart
COLUMNS = [7, 33, 200]
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
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
CODE = [
    pytest.param(HERE, TABLES, id=str(HERE)),
    *(pytest.param(isa, TABLES[: len(COLUMNS)], id=isa, marks=pytest.mark.slow) for isa in LONGER),
]


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


@pytest.mark.process
@pytest.mark.parametrize(("isa", "tables"), CODE)
def test_any_number_of_columns_agrees(isa: str | None, tables: list[Table], tmp_path: Path) -> None:
    program: Any = torch._inductor.aoti_load_package(str(compile_for(isa, tables, tmp_path)))
    for rows, columns in itertools.product((4, 64, 68, 1000), COLUMNS):
        torch.manual_seed(rows)
        given = [table.of(rows, columns) for table in tables]
        answers = zip(tables, program(given), Reductions()(given), Reductions()([x.double() for x in given]))
        for table, ours, eager, wide in answers:
            floor = allowed_error(Accuracy(rms=0, greatest=0), str(table.dtype).removeprefix("torch.")).greatest
            for how, mine, its, reference in zip(REDUCTIONS, ours, eager, wide, strict=True):
                which = f"{how} of {rows} rows of {table}, {columns} columns"
                if not its.dtype.is_floating_point:
                    assert torch.equal(mine, its), which
                else:
                    typical = typical_magnitude(reference)
                    allowed = 3 * measure_error(reference, its, typical=typical).size.greatest + floor
                    found = measure_error(reference, mine, typical=typical).size.greatest
                    assert found <= allowed, f"{which}: {found:.3g}, allowed are {allowed:.3g}"


@pytest.mark.process
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
