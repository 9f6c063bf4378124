"""What a refusal says to write in place of a line is right: the model so written traces, and answers what was meant."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.torch_version import TorchVersion

from exportkit.errors import ExportError
from exportkit.export.trace.line_hints import to_keep_the_range
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


def halved(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x * 0.5
    return x


def found_experts(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    chosen = x.argmax(1) % 3
    for n in chosen.unique():
        out.index_add_(0, torch.where(chosen == n)[0], x[torch.where(chosen == n)[0]])
    return out


def all_experts(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    chosen = x.argmax(1) % 3
    for n in range(3):
        out.index_add_(0, torch.where(chosen == n)[0], x[torch.where(chosen == n)[0]])
    return out


def asserted(x: Tensor) -> Tensor:
    assert x.isfinite().all()
    return x * 2


def stated(x: Tensor) -> Tensor:
    torch._check(x.isfinite().all().item())
    return x * 2


def running(x: Tensor) -> Tensor:
    total, found = torch.zeros(8), []
    for row in x:
        total = total * 0.5 + row
        found.append(total)
    return torch.stack(found)


def scanned(x: Tensor) -> Any:
    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        total = total * 0.5 + row
        return total, total.clone()

    return scan(step, torch.zeros(8), x)[1]


def told(x: Tensor) -> Tensor:
    assert f"{x.mean():.3f}"
    return x + 1


def told_in_eager(x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        assert f"{x.mean():.3f}"
    return x + 1


def kept_by_size(x: Tensor) -> Tensor:
    return x + {6: 1.0}.get(x.shape[0], 1.0)


def covariance(x: Tensor) -> Tensor:
    d = x - x.mean(1, keepdim=True)
    return d @ d.T / (x.shape[1] - 1)


def doubled(count: Any) -> Callable[[Tensor], Any]:
    return lambda x: while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x * 2), (count, x.clone()))[1]


def loss(x: Tensor) -> Tensor:
    lengths = torch.tensor([4, 4])
    labels = torch.ones(2, 3, dtype=torch.int64)
    return torch.nn.functional.ctc_loss(x.log_softmax(-1), labels, lengths, lengths - 1)


def found(x: Tensor) -> Tensor:
    chosen = x[x > 0]
    torch._check(chosen.shape[0] > 0)
    return chosen.logsumexp(0)


def pairs(x: Tensor) -> Tensor:
    """The differences of all pairs."""
    pairs = torch.combinations(torch.arange(8))
    return (x[:, pairs[:, 1]] - x[:, pairs[:, 0]]).square().sum(1)


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
    "classes": Pair(
        lambda x, i: torch.nn.functional.one_hot(i) + x[0, 0], "num_classes=",
        lambda x, i: torch.nn.functional.one_hot(i, num_classes=3) + x[0, 0], (X, LABELS),
    ),
    "counts": Pair(
        lambda x, i: x[:3].split(torch.bincount(i, minlength=3).tolist())[0], "one_hot(i, 3).sum(0).tolist()",
        lambda x, i: x[:3].split(torch.nn.functional.one_hot(i, 3).sum(0).tolist())[0], (X, LABELS),
    ),
    "math": Pair(
        lambda x: x * math.exp(x.max().item()), "torch.exp(x.max())", lambda x: x * torch.exp(x.max())
    ),
    "float": Pair(lambda x: x * float(x.max()), "Leave float() out", lambda x: x * x.max()),
    "while": Pair(
        halved, "Write while_loop(lambda x",
        lambda x: while_loop(lambda x: x.norm() > 1, lambda x: (x * 0.5,), (x.clone(),))[0],
    ),
    "experts": Pair(found_experts, "Loop over all that there may be", all_experts, (X,), ROWS),
    "assert": Pair(asserted, "torch._check(condition.item())", stated, (X,), ROWS, "2.12"),
    "half": Pair(
        lambda x: x[: int(x.shape[0] / 2)].sum(0), "n // 2 for int(n / 2)",
        lambda x: x[: x.shape[0] // 2].sum(0), (X,), ROWS,
    ),
    "fraction": Pair(
        lambda x: x[: int(0.3 * x.shape[0]) + 1].sum(0), "3 * n // 10 for int(0.3 * n)",
        lambda x: x[: 3 * x.shape[0] // 10 + 1].sum(0), (X,), ROWS,
    ),
    "ceil": Pair(
        lambda x: x[: math.ceil(x.shape[0] / 4)].sum(0), "-(-n // 4) in place of math.ceil(n / 4)",
        lambda x: x[: -(-x.shape[0] // 4)].sum(0), (X,), ROWS,
    ),
    "root": Pair(
        lambda x: x / math.sqrt(x.shape[0]), "torch.scalar_tensor(n).sqrt()",
        lambda x: x / torch.scalar_tensor(x.shape[0]).sqrt(), (X,), ROWS,
    ),
    "rows": Pair(
        lambda x: torch.stack([row.softmax(0) for row in x]), "torch.vmap(f)(rows)",
        lambda x: torch.vmap(lambda row: row.softmax(0))(x), (X,), ROWS, "2.13",
    ),
    "scan": Pair(running, "scan(step, start, rows)", scanned, (X,), ROWS),
    "text": Pair(told, "if not torch.compiler.is_compiling()", told_in_eager),
    "key": Pair(kept_by_size, "no key of a dict", lambda x: x + 1.0, (X,), ROWS),
    "equal": Pair(
        lambda x: x * 2 if torch.equal(x[0], x[1]) else x, "(a == b).all()",
        lambda x: torch.where((x[0] == x[1]).all(), x * 2, x),
    ),
    "maximum": Pair(
        lambda x: x * max(torch.ones(()), x.sum()), "write torch's",
        lambda x: x * torch.maximum(torch.ones(()), x.sum()),
    ),
    "length": Pair(
        lambda x: torch.cat([x, x[: builtins.len(x) - 1]]), "x.shape[0] for len(x)",
        lambda x: torch.cat([x, x[: x.shape[0] - 1]]), (X,), ROWS,
    ),
    "covariance": Pair(lambda x: torch.cov(x), "d @ d.T / (x.shape[1] - 1) for torch.cov(x)", covariance, (X,), ROWS),
    "correlation": Pair(
        lambda x: torch.corrcoef(x), "divided by s[:, None] * s with s = x.std(1)",
        lambda x: covariance(x) / (x.std(1)[:, None] * x.std(1)), (X,), ROWS,
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
    "least squares": Pair(
        lambda x: torch.linalg.lstsq(x, x[..., :1])[0], "pinv(a) @ b",
        lambda x: torch.linalg.pinv(x) @ x[..., :1], (torch.rand(4, 5, 2),), {"x": {0: "rows[4:9]"}},
    ),
    "histogram": Pair(
        lambda x: torch.histogram(x, 4, range=(0.0, 1.0))[0], "torch.histc(x, bins=4",
        lambda x: torch.histc(x, bins=4, min=0, max=1), sizes=ROWS,
    ),
    "carried": Pair(doubled(0), "torch.tensor(0) for a number", lambda x: doubled(torch.tensor(0))(x)),
}  # fmt: skip


def export(function: Callable[..., Any], pair: Pair, folder: Path) -> None:
    spec = spec_of(function, *pair.inputs, shapes=pair.sizes)
    exported(spec, folder, cases=2, edge_cases=pair.says == "write torch's")


@pytest.mark.slow_but("range", "classes", "counts", "math", "assert", "maximum", "sizes", "found", "text")
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


def test_a_loss_is_left_outside_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"does not know the shape of what aten(.|\n)*outside of the model"):
        exported(spec_of(loss, torch.rand(4, 2, 5)), tmp_path)


def test_pairs_that_torch_selects_with_a_mask_have_two_substitutes(tmp_path: Path) -> None:
    table = torch.combinations(torch.arange(8))
    if TorchVersion(torch.__version__) < "2.14":
        with pytest.raises(ExportError, match=r"loses track of a size that depends on values(.|\n)*torch.triu\(y, 1\)"):
            exported(spec_of(pairs, X, shapes=ROWS), tmp_path)
    for instead in (
        lambda x: (x[:, table[:, 1]] - x[:, table[:, 0]]).square().sum(1),
        lambda x: torch.triu(x[:, None, :] - x[:, :, None], 1).square().sum((1, 2)),
    ):
        torch.testing.assert_close(instead(X), pairs(X))
        exported(spec_of(instead, X, shapes=ROWS), tmp_path)


def test_hints_about_lines_that_fix_a_size_are_told_of_what_the_lines_do() -> None:
    """A list that is made of sizes is no loop over rows, and a branch that pads may go."""
    loop, pads = "write no Python loop", "without the `if`"
    said = {
        "m.py:3 in forward: `for row in x:` needs x:0 == 6": loop,
        "m.py:3 in forward: `torch.stack([f(row) for row in x])` needs x:0 == 6": loop,
        "m.py:3 in forward: `torch.as_tensor([f.shape[-1] for f in features])` needs (x:2//8) == 8": "",
        "m.py:3 in forward: `sizes = [f.shape[-1] * 2 for f in features]` needs x:2 == 8": "",
        "m.py:3 in forward: `if pad > 0:` needs (Mod(32 - (Mod(x:2, 32)), 32)) > 0": pads,
        "m.py:3 in forward: `if x.shape[0] > 5:` needs x:0 <= 5": "",
    }
    for line, hint in said.items():
        assert (hint in to_keep_the_range([line])) if hint else not to_keep_the_range([line]), line


def test_a_branch_that_pads_is_written_without_it(tmp_path: Path) -> None:
    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 4)).unflatten(0, (-1, 4)).sum(1)

    export(padded, Pair(padded, "", padded, sizes=ROWS), tmp_path)
