"""Sums of any length are as accurate as eager's, whatever loops Inductor makes of them."""

from __future__ import annotations

from collections.abc import Callable
from math import fsum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.nn import functional

from exportkit.accuracy import allowed_error, measure_error, typical_magnitude
from exportkit.export.compile.inductor_changes import changed_inductor
from exportkit.package.manifest import Accuracy
from tests.export.compiled_code import compile_code

# Of rows with 18 columns.
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
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


class Sums(torch.nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [how(x) for how in SUMS.values()]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The name of a dtype, and the sums in its code, whose example has 40 rows."""
    x = torch.rand(40, 18).to(getattr(torch, request.param))
    program = torch.export.export(Sums(), (x,), dynamic_shapes=({0: Dim("half", min=1, max=1 << 20) * 2},))
    package = compile_code(program, tmp_path_factory.mktemp("sums"), **{"cpp.dynamic_threads": True})
    return request.param, torch._inductor.aoti_load_package(str(package))


@pytest.mark.process
@pytest.mark.parametrize("values", ["equal", "of two values", "random"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_sum_is_as_accurate_as_eager(compiled: Any, values: str, threads: int) -> None:
    """Equal values are the worst: their rounding errors have one sign."""
    dtype, program = compiled
    floor = allowed_error(Accuracy(rms=0, greatest=0), dtype).greatest
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (10, 64, 66, 700, 4098, 30_000, 200_000):
            torch.manual_seed(rows)
            x = torch.rand(rows, 18) if values == "random" else torch.full((rows, 18), 0.1)
            x = (x + 0.3 * (torch.arange(rows) % 2)[:, None] if values == "of two values" else x).to(
                getattr(torch, dtype)
            )
            answers = zip(SUMS, program(x), Sums()(x), Sums()(x.double()), strict=True)
            for how, ours, eager, wide in answers:
                if values != "equal" or how not in NOT_OF_EQUAL:
                    typical = typical_magnitude(wide)
                    allowed = max(floor, measure_error(wide, eager, typical=typical).size.greatest)
                    found = measure_error(wide, ours, typical=typical).size.greatest
                    assert found <= allowed, f"{how} of {rows} rows: {found:.3g}, allowed are {allowed:.3g}"
    finally:
        torch.set_num_threads(before)


def test_cascades_hold_numbers_of_64_bits() -> None:
    rows = torch.full((200_000, 3), 0.1, dtype=torch.float64)
    with changed_inductor():
        options = {"cpp.dynamic_threads": True, "fx_graph_cache": False}
        (found, *_) = torch.compile(lambda x: x.sum(0), options=options)(rows)
    assert found == pytest.approx(fsum(rows[:, 0].tolist()), rel=64 * 2**-52)


class Variances(torch.nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.var(-1), x.t().contiguous().var(0), x.std(), functional.gelu(x).var(-1), torch.var_mean(x, 1)[0]


@pytest.mark.process
def test_a_variance_is_accurate_where_the_mean_is_many_deviations_away(tmp_path: Path) -> None:
    elements = {1: Dim("elements", min=2, max=1 << 20)}
    program = torch.export.export(Variances(), (torch.rand(8, 40),), dynamic_shapes=(elements,))
    compiled: Any = torch._inductor.aoti_load_package(str(compile_code(program, tmp_path)))
    torch.manual_seed(0)
    for away in (0, 100, 1000, 10_000):
        x = torch.randn(8, 4096) + away
        for ours, eager, wide in zip(compiled(x), Variances()(x), Variances()(x.double()), strict=True):
            typical = typical_magnitude(wide)
            allowed = allowed_error(measure_error(wide, eager, typical=typical).size, "float32").greatest
            assert measure_error(wide, ours, typical=typical).size.greatest <= allowed, f"{away} deviations away"
