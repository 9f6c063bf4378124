"""What follows from weights, constants and sizes is known while a model is traced, and what follows from others is not.

tests/gallery/fixed.py has the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from exportkit import load
from exportkit.errors import ExportError, RefusedValueError
from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.placement import prepared
from exportkit.spec import ExportSpec
from tests.export.function_models import FunctionModel, spec_of, traced
from tests.gallery.fixed import BranchOnState, BranchOnWeight, GridInBuffer

TIMES = torch.tensor([[2, 1], [0, 3]])
OTHERS = "the weights decide otherwise"


class Here(FunctionModel):
    """A model of this file: Python's `len` is replaced in the files of a model's classes, and nowhere else."""


def program_of(spec: ExportSpec) -> nn.Module:
    (method,) = traced(spec, cases=1).methods
    return method.program.module()


def sizes(x: Tensor) -> Tensor:
    return torch.tensor([[len(x), x.shape[1]], [3, x.shape[0] // 2]])


@pytest.mark.slow_but("<lambda>4", "<lambda>6")
@pytest.mark.parametrize(
    "number",
    [
        lambda x: sizes(x).prod(1).cumsum(0)[-1].item(),
        lambda x: sizes(x).sum().item() - sizes(x).amax(0).sum().item(),
        lambda x: (sizes(x)[[1, 0], 1] * 2 - sizes(x).flip(0)[:, 1]).max().item(),
        lambda x: torch.stack([sizes(x) // 2, 7 - sizes(x) % 5]).minimum(TIMES).view(2, -1).sum(-1).tolist()[0] + 8,
        lambda x: sum(row.prod() for row in sizes(x)).item(),
        lambda x: (x.new_tensor([len(x)], dtype=torch.int32) + torch.arange(3).view(3, 1)).long()[2].item(),
        lambda x: torch.where(TIMES > 1, TIMES, 0).sum().item() + torch.full((2,), len(x)).cumprod(0)[1].item(),
        lambda x: torch.as_tensor(x.shape).index_select(0, torch.tensor([1])).div(2, rounding_mode="floor").item(),
    ],
)
def test_a_number_from_a_tensor_of_sizes_is_right_at_other_sizes(number: Callable[[Tensor], int]) -> None:
    def at(x: Tensor) -> Tensor:
        return torch.ones(number(x)).cumsum(0)

    program = program_of(spec_of(Here(at), torch.rand(4, 6), shapes={"x": {0: "n[2:9]", 1: "m[4:9]"}}))
    for shape in ((2, 4), (2, 9), (9, 4), (7, 8), (3, 5)):
        assert program(torch.rand(shape)).equal(at(torch.rand(shape)))


@pytest.mark.slow_but("<lambda>0", "<lambda>1")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.tensor_split(torch.arange(4.0), torch.tensor([1, 3]))[1],
        lambda x: x[:, torch.where(TIMES[0] > 1)[0]],
        lambda x: x.unsqueeze(-1) * nn.functional.one_hot(TIMES[0]),
        lambda x: x[:, torch.argwhere(TIMES > 0)[:, 0]].reshape(-1, 3),
        lambda x: x.repeat_interleave(TIMES[0], 1).reshape(-1, 3) + torch.unique_consecutive(TIMES[0])[0],
        lambda x: x[:, TIMES[0] > 1].reshape(-1, 1) if torch.allclose(TIMES[0] + 0.0, TIMES[0].float()) else x,
    ],
)
def test_sizes_that_follow_from_constants_are_known(function: Callable[[Tensor], Tensor]) -> None:
    program = program_of(spec_of(lambda x: function(x), torch.rand(4, 2), shapes={"x": {0: "n[1:9]"}}))
    x = torch.rand(7, 2)
    assert program(x).equal(function(x))
    (result,) = program.graph.find_nodes(op="output")[0].args[0]
    assert not any("u" in str(size) for size in result.meta["val"].shape)


@pytest.mark.slow_but("2", "51")
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 51])
def test_linspace_of_a_size_is_as_near_as_eagers(steps: int) -> None:
    def line(x: Tensor) -> Tensor:
        return torch.linspace(0.5, x.shape[0] - 0.5, x.shape[0]) + x

    program = program_of(spec_of(line, torch.rand(5), shapes={"x": {0: "n[1:64]"}}))
    torch.testing.assert_close(program(torch.zeros(steps)), line(torch.zeros(steps)), rtol=3e-7, atol=0)


def test_a_value_of_declared_state_is_unknown() -> None:
    with pytest.raises(ExportError, match="the model branches on the value of a tensor"):
        program_of(spec_of(BranchOnState(), torch.rand(4, 2), state=("calls",)))


def test_a_number_from_a_floating_weight_stays_that_of_the_weights_that_run() -> None:
    program = program_of(spec_of(BranchOnWeight(), torch.rand(4, 2)))
    other = BranchOnWeight()
    other.weight.data *= 2
    program.load_state_dict(other.state_dict())
    x = torch.rand(4, 2)
    torch.testing.assert_close(program(x), other(x))


@pytest.mark.parametrize(("weight", "times"), [(0.1, 3), (2.0, 4)])
def test_a_program_refuses_weights_that_decide_otherwise(weight: float, times: int) -> None:
    program = program_of(spec_of(BranchOnWeight(), torch.rand(4, 2)))
    program.load_state_dict({"weight": torch.full((2,), weight), "times": torch.tensor(times)})
    with pytest.raises(RuntimeError, match=OTHERS):
        program(torch.rand(4, 2))


@pytest.mark.slow
def test_a_package_refuses_weights_that_decide_otherwise(tmp_path: Path) -> None:
    spec = spec_of(GridInBuffer(), torch.rand(2, 40, 3), shapes={"x": {0: "batch[1:4]"}})
    export_aoti(spec, tmp_path / "grid.pt2", TraceOptions(cases=1, edge_cases=False))
    x = torch.rand(3, 40, 3)
    with load(tmp_path / "grid.pt2", device="cpu") as package:
        torch.testing.assert_close(package(x), spec.model(x))
        package.swap_weights({"grid": torch.tensor([[1, 6, 4], [2, 2, 4]])})
        with pytest.raises(RefusedValueError, match=OTHERS):
            package(x)


def test_reading_a_value_leaves_the_weights_and_the_model_as_they_are() -> None:
    def filled(x: Tensor) -> Tensor:
        table = model.table.clone()
        table[1:].mul_(2)
        return x + 1 if table.sum() > 10 else x

    model = FunctionModel(filled)
    model.table = nn.Buffer(torch.arange(4.0), persistent=False)
    program_of(spec_of(model, torch.rand(4)))
    assert model.table.equal(torch.arange(4.0))
    assert "len" not in globals()


def test_tensors_that_modules_keep_beside_their_state_move_with_the_model() -> None:
    model = nn.Linear(3, 3)
    model.table = torch.ones(3)
    model.kept = [{"same": model.table}, torch.tensor(2.0)]
    with prepared(spec_of(model, torch.rand(2, 3)), torch.device("meta"), torch.bfloat16) as spec:
        assert (spec.model.table.device.type, spec.model.table.dtype) == ("meta", torch.float32)
        assert spec.model.kept[0]["same"] is spec.model.table
        assert spec.model.kept[1].device.type == "cpu"  # a number, which torch takes on any device
    assert model.table.device.type == "cpu"
