"""The file of `verify --bisect` shows a difference with torch alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exportkit.errors import ExportError
from exportkit.export.programs.cut_program import cut_points
from exportkit.export.programs.reproduction import MOST_LITERALS, reproduction, reproduction_source, values_of

X = torch.tensor([[-1.5, 0.0, 2.0, float("nan")], [float("inf"), -0.0, 3.25, 1e-30]], dtype=torch.bfloat16)


class Chain(torch.nn.Module):
    """A weight, a part of a result, sizes, and names that Python reserves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * self.scale
        largest, _ = scaled.topk(2)
        return torch.relu(largest) + scaled.shape[0]


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    """With a dynamic batch."""
    return torch.export.export(Chain(), (X,), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=8)}})


def _file(program: torch.export.ExportedProgram, x: torch.Tensor, depth: int | None, name: str = "relu") -> str:
    point = next(node for node in cut_points(program) if node.name == name)
    found = reproduction([point], values_of(program, [x]), depth)
    options = {"cpp.inject_relu_bug_TESTING_ONLY": "accuracy", "cpp.vec_isa_ok": True}
    return reproduction_source(found, options, dynamic=True, title='relu "differs"\n')


@pytest.mark.parametrize("depth", [1, 2, None])
def test_the_file_computes_what_the_graph_does(program: torch.export.ExportedProgram, depth: int | None) -> None:
    names: dict[str, object] = {"__name__": "reproduction"}
    exec(_file(program, X, depth), names)
    (answer,) = names["function"](*names["inputs"]())  # type: ignore[operator]
    with torch.no_grad():
        largest = (X * Chain().scale).topk(2)[0]
    assert torch.equal(answer.nan_to_num(7), torch.relu(largest).nan_to_num(7))
    assert answer.dtype is torch.bfloat16


def test_the_file_has_the_lines_of_the_model_and_the_values(program: torch.export.ExportedProgram) -> None:
    source = _file(program, X, None)
    assert "relu = torch.ops.aten.relu.default(getitem)  # test_reproduction.py:" in source
    assert "-1.5, 0.0, 2.0, nan" in source
    assert "exportkit" not in source


def test_many_values_are_drawn(program: torch.export.ExportedProgram) -> None:
    large = torch.ones(MOST_LITERALS, 4, dtype=torch.bfloat16)
    source = _file(program, large, 3)
    assert "torch.manual_seed(0)" in source
    assert len(source) < 5000


def test_other_peoples_operators_are_not_written() -> None:
    library = torch.library.Library("reproduced", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")

    class Foreign(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.reproduced.twice(x)

    program = torch.export.export(Foreign(), (X,))
    (point,) = cut_points(program)
    with pytest.raises(ExportError, match=r"twice calls reproduced\.twice\.default, which is not written as Python"):
        reproduction([point], values_of(program, [X]), 1)


@pytest.mark.process
def test_the_file_shows_the_difference_by_itself(program: torch.export.ExportedProgram, tmp_path: Path) -> None:
    """torch's own hook makes relu wrong. The file runs where nothing but torch can be imported."""
    file = tmp_path / "relu.py"
    file.write_text(_file(program, X, 1))
    done = subprocess.run([sys.executable, "-I", file.name], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "relu: " in done.stdout
    assert "elements differ" in done.stdout
    assert "compiled and eager differ with torch" in done.stdout
