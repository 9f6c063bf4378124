"""A traced program that answers something else than eager is refused at export; tests/gallery has more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exportkit.errors import ExportError
from tests.export.function_models import exported, spec_of

CONSTANT = "tracing made a constant of something that depends on a size"


def export(model: Callable[..., Tensor], folder: Path, x: Tensor) -> None:
    exported(spec_of(model, x, shapes={"x": {0: "batch[2:8]"}}), folder)


class Untold(torch.nn.Module):
    """Adds a table of as many rows as the last eager call had: the traced program cannot add it to another number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.table = torch.ones(x.shape[0])
        return torch.cat([x.sum(1), self.table])


def test_an_output_of_another_size_than_eagers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"promises output 0 of \[6\], and eager answered \[4\] at batch=2.*"
    ) as caught:
        export(Untold(), tmp_path, torch.rand(4, 3))
    assert CONSTANT in caught.value.message


def test_a_program_that_differs_at_the_examples_sizes_is_no_matter_of_sizes(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match="answers other values than eager in output 0 at batch=4: tracing made"
    ) as caught:
        export(lambda x: x * 3 if torch.compiler.is_exporting() else x, tmp_path, torch.rand(4, 3))
    assert CONSTANT not in caught.value.message


def branches(x: Tensor) -> Tensor:
    """Takes another way for few rows, of which tracing knows nothing."""
    if not torch.compiler.is_exporting() and x.shape[0] < 4:
        return x + x
    # As the int8 product on CUDA does.
    torch._assert_async(torch.full((), x.shape[0]) >= 4, "needs at least 4 rows")
    return x * 2


def test_sizes_at_which_eager_takes_another_way_are_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="eager takes another way there, which") as caught:
        export(branches, tmp_path, torch.rand(5, 3))
    assert "raises RuntimeError: needs at least 4 rows at batch=2" in caught.value.message
    assert exported(spec_of(branches, torch.rand(5, 3), shapes={"x": {0: "batch[4:8]"}}), tmp_path)


def padded(allocate: Any) -> Callable[[Tensor], Tensor]:
    """Writes two rows at each end, which are all that the example has."""

    def forward(x: Tensor) -> Tensor:
        scratch = torch.empty_like(x)
        scratch.copy_(x * 2)
        room = allocate(x.shape[0], 3)
        room[:2], room[-2:] = x[:2], x[-2:]
        return room + scratch

    return forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_memory_that_nobody_wrote_is_named_as_such_with_its_line(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.ones(4, 3).to(dtype)
    with pytest.raises(ExportError, match="the model reads memory that nobody wrote, at batch=") as caught:
        export(padded(lambda *size: torch.empty(*size, dtype=dtype)), tmp_path, x)
    assert "aten.empty.memory_format at test_program_check.py:" in caught.value.message
    assert "empty_like" not in caught.value.message
    assert caught.value.hint.startswith("Write every element before it is read, or allocate with torch.zeros")
    export(padded(lambda *size: torch.zeros(*size, dtype=dtype)), tmp_path, x)
