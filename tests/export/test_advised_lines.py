"""What a refusal says to write in place of a line is right: the model so written traces, and answers what was meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop
from torch.torch_version import TorchVersion

from exportkit.errors import ExportError
from tests.export.function_models import exported, spec_of
from tests.gallery.entries import LONGEST, NOISE

LAYERS = [torch.nn.Linear(8, 8).requires_grad_(False) for _ in range(3)]
X, LABELS, N = torch.rand(6, 8), torch.tensor([2, 0, 1]), torch.tensor(2)
GRID, ENTRIES, VALUES = torch.rand(6, 8, 3), torch.tensor([[0, 1, 3], [5, 2, 2]]), torch.rand(3)
ROWS = {"x": {0: "rows[2:64]"}}


@dataclass(frozen=True)
class Pair:
    """A line that is refused, what is said, and the line that is written for it.

    `file_since` is the first torch that writes such a program to a file; those before it compile it.
    """

    wrong: Callable[..., Any]
    says: str
    right: Callable[..., Any]
    inputs: tuple[Tensor, ...] = (X,)
    sizes: dict[str, dict[int, str]] = field(default_factory=dict)
    file_since: str = "2.11"


def first_rows(x: Tensor, n: Tensor) -> Tensor:
    total = torch.zeros(8)
    for row in range(int(n)):
        total = total + x[row]
    return total


def rows_up_to(x: Tensor, n: Tensor) -> Tensor:
    total = torch.zeros(8)
    for row in range(6):
        total = torch.where(row < n, total + x[row], total)
    return total


def asserted(x: Tensor) -> Tensor:
    assert x.isfinite().all()
    return x * 2


def stated(x: Tensor) -> Tensor:
    torch._check(x.isfinite().all().item())
    return x * 2


def doubled(count: Any) -> Callable[[Tensor], Any]:
    return lambda x: while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x * 2), (count, x.clone()))[1]


def found(x: Tensor) -> Tensor:
    chosen = x[x > 0]
    torch._check(chosen.shape[0] > 0)
    return chosen.logsumexp(0)


def parts(x: Tensor, n: Tensor) -> Tensor:
    h, w = n[:2].tolist()
    for size, most in ((h, 6), (w, 8)):
        torch._check(size >= 0)
        torch._check(size <= most)
    return torch.narrow(torch.narrow(x, 0, 0, h), 1, 0, w).reshape(-1, 3)


PAIRS = {
    "module": Pair(
        lambda x, n: LAYERS[n](x), "torch.stack([f(x) for f in layers]).index_select(0, n.view(1))[0]",
        lambda x, n: torch.stack([f(x) for f in LAYERS]).index_select(0, n.view(1))[0], (X, N),
    ),
    "range": Pair(first_rows, "h = torch.where(t < n, step(h), h)", rows_up_to, (X, N)),
    "float": Pair(lambda x: x * float(x.max()), "Leave int(), float() or range() out", lambda x: x * x.max()),
    "assert": Pair(asserted, "torch._check(condition.item())", stated, (X,), ROWS, "2.12"),
    "maximum": Pair(
        lambda x: x * max(torch.ones(()), x.sum()), "write torch's",
        lambda x: x * torch.maximum(torch.ones(()), x.sum()),
    ),
    "sparse": Pair(
        lambda x: torch.sparse.mm(torch.sparse_coo_tensor(ENTRIES, VALUES, (4, 6)), x),
        "index_add(0, rows, values[:, None]",
        lambda x: x.new_zeros(4, x.shape[1]).index_add(0, ENTRIES[0], VALUES[:, None] * x[ENTRIES[1]]),
        sizes={"x": {1: "columns[2:64]"}},
    ),
    "sizes": Pair(
        lambda x, n: x[: n[0], : n[1]].reshape(n[0] * n[1], -1), "torch.narrow(x, 0, 0, h)", parts, (GRID, LABELS + 1),
    ),
    "found": Pair(lambda x: x[x > 0].logsumexp(0), "torch._check(x.shape[0] > 0)", found),
    "carried": Pair(doubled(0), "torch.tensor(0) for a number", lambda x: doubled(torch.tensor(0))(x)),
}  # fmt: skip


def export(function: Callable[..., Any], pair: Pair, folder: Path) -> None:
    spec = spec_of(function, *pair.inputs, shapes=pair.sizes)
    exported(spec, folder, cases=2, edge_cases=pair.says == "write torch's")


@pytest.mark.slow_but("range", "assert", "maximum", "sizes", "found")
@pytest.mark.parametrize("name", PAIRS)
def test_what_is_said_to_write_instead_traces(name: str, tmp_path: Path) -> None:
    pair = PAIRS[name]
    with pytest.raises(ExportError) as caught:
        export(pair.wrong, pair, tmp_path)
    assert pair.says in (caught.value.hint or ""), caught.value.message
    said = f"{caught.value.message}\n{caught.value.hint}"
    assert NOISE.search(said) is None
    assert len(said) < LONGEST
    if TorchVersion(torch.__version__) >= pair.file_since:
        export(pair.right, pair, tmp_path)
    else:
        with pytest.raises(ExportError, match="cannot write the program to a file"):
            export(pair.right, pair, tmp_path)
    torch.testing.assert_close(pair.right(*pair.inputs), pair.wrong(*pair.inputs))
