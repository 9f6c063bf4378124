"""Sums of any length are as accurate as eager's, whatever loops Inductor makes of them."""

from __future__ import annotations

from collections.abc import Callable
from math import fsum
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.nn import functional

from exportkit.accuracy import allowed_error, measure_error, typical_magnitude
from exportkit.package.manifest import Accuracy
from tests.export.compiled_code import compile_code

pytestmark = pytest.mark.slow

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


@pytest.mark.process
@pytest.mark.parametrize("values", ["equal", "of two values", "random"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_sum_is_as_accurate_as_eager(compiled: Any, dtype: str, values: str, threads: int) -> None:
    """Equal values are the worst: their rounding errors have one sign."""
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
            eager, wide = ([how(each) for how in SUMS.values()] for each in (x, x.double()))
            for how, ours, its, reference in zip(SUMS, compiled(dtype, x), eager, wide, strict=True):
                if values != "equal" or how not in NOT_OF_EQUAL:
                    typical = typical_magnitude(reference)
                    allowed = max(floor, measure_error(reference, its, typical=typical).size.greatest)
                    found = measure_error(reference, ours, typical=typical).size.greatest
                    assert found <= allowed, f"{how} of {rows} rows: {found:.3g}, allowed are {allowed:.3g}"
    finally:
        torch.set_num_threads(before)


@pytest.mark.process
def test_cascades_hold_numbers_of_64_bits(compiled: Any) -> None:
    rows = torch.full((200_000, 3), 0.1, dtype=torch.float64)
    (found, *_) = compiled("float64", rows)[0]
    assert found == pytest.approx(fsum(rows[:, 0].tolist()), rel=64 * 2**-52)


@pytest.mark.process
def test_a_variance_is_accurate_where_the_mean_is_many_deviations_away(compiled: Any) -> None:
    torch.manual_seed(0)
    for away in (0, 100, 1000, 10_000):
        x = torch.randn(8, 4096) + away
        for ours, eager, wide in zip(compiled("noise", x), variances(x), variances(x.double()), strict=True):
            typical = typical_magnitude(wide)
            allowed = allowed_error(measure_error(wide, eager, typical=typical).size, "float32").greatest
            assert measure_error(wide, ours, typical=typical).size.greatest <= allowed, f"{away} deviations away"
