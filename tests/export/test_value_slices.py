"""Slices whose ends are values of tensors are compiled, and answer what eager does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exportkit.errors import ExportError
from exportkit.export.artifact import export_aoti
from exportkit.export.compile import inductor_changes
from exportkit.export.compile.compile_failure import wrong_code
from exportkit.export.export_options import TraceOptions
from exportkit.runtime.loader import load
from exportkit.spec import ExportSpec


class Slices(torch.nn.Module):
    """One end, the other, both, a step, and a dimension that does not come first."""

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        end = n.item()
        chosen = (x[:end], x[end:], x[1:end], x[end:3], x[:end:2], x[-end:], x[:, :end], x[None, :, end:])
        return tuple(part.sum(0).sum() for part in chosen)


@pytest.mark.process
def test_a_slice_may_end_or_begin_at_a_value(tmp_path: Path) -> None:
    def draw(sizes: dict[str, int], generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], dict]:
        return (torch.rand(sizes["rows"], 3, generator=generator), torch.randint(-6, 7, (), generator=generator)), {}

    shapes = {"x": {0: "rows[3:9]"}}
    example = (torch.rand(4, 3), torch.tensor(2))
    spec = ExportSpec(Slices(), example, dynamic_shapes=shapes, draw_inputs=draw)
    export_aoti(spec, tmp_path / "slices.pt2", TraceOptions(cases=1, edge_cases=False))
    with load(tmp_path / "slices.pt2", device="cpu") as model:
        for rows in (3, 4, 9):
            x = torch.rand(rows, 3)
            for n in range(-10, 11):
                torch.testing.assert_close(model(x, torch.tensor(n)), Slices()(x, torch.tensor(n)))


class Slice(torch.nn.Module):
    """The beginning of a tensor."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x[: n.item()].sum(0)


@pytest.mark.process
def test_code_that_does_not_compile_names_the_operator_and_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_changes, "_slices_with_two_ends", lambda make, *given: make(*given))
    spec = ExportSpec(Slice(), (torch.rand(4, 3), torch.tensor(2)))
    with pytest.raises(ExportError) as caught:
        export_aoti(spec, tmp_path / "slice.pt2", TraceOptions(cases=1, edge_cases=False))
    assert re.fullmatch(
        r"AOTInductor could not compile the program at aten\.slice\.Tensor, test_value_slices\.py:\d+ in forward: "
        r"`return x\[: n\.item\(\)\]\.sum\(0\)`: torch \S+ wrote C\+\+ code that does not compile: .None. was not "
        r"declared in this scope\n    int64_t \w+_st_index = .*;",
        caught.value.message,
    )
    assert "--repair" in (caught.value.hint or "")


def test_what_the_compiler_lacks_is_not_taken_for_wrong_code(tmp_path: Path) -> None:
    source = tmp_path / "model.wrapper.cpp"
    source.write_text("#include <missing.h>\n")
    assert wrong_code("model.wrapper.cpp:1:10: fatal error: missing.h: No such file or directory", {}, tmp_path) is None
    assert wrong_code("/usr/bin/ld: cannot find -ltorch", {}, tmp_path) is None
