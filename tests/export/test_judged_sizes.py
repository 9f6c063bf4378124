"""Whatever example a model is traced from, it takes all declared sizes where one program does for all; else none do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exportkit import ExportSpec
from exportkit.export.artifact import export_aoti
from exportkit.export.models.call_signature import describe_call
from exportkit.export.sizes.shapes import dynamic_sizes
from exportkit.export.trace.judged_sizes import export_judged
from exportkit.export.trace.torch_export import RefusedByTorchError, TracingTask
from exportkit.runtime.loader import load

Block = Callable[[Tensor, int], Tensor]

SIDES = (16, 64)
RANGES = {"batch": (1, 3), "h": SIDES, "w": SIDES}


def _pads_if_needed(x: Tensor, k: int) -> Tensor:
    h, w = x.shape[2:]
    below, right = -h % k, -w % k
    if below > 0 or right > 0:
        x = F.pad(x, (0, right, 0, below))
    return x.cumsum(3)[:, :, :h, :w]


def _pads_each_side(x: Tensor, k: int) -> Tensor:
    h, w = x.shape[2:]
    if h % k != 0:
        x = F.pad(x, (0, 0, 0, -h % k), mode="replicate")
    if w % k != 0:
        x = F.pad(x, (0, -w % k))
    return F.avg_pool2d(x, k, 1, k // 2, count_include_pad=False)[:, :, :h, :w]


def _windows(x: Tensor, k: int) -> Tensor:
    b, c, h, w = x.shape
    padded = F.pad(x, (0, -w % k, 0, -h % k))
    rows, columns = padded.shape[2] // k, padded.shape[3] // k
    inside = padded.view(b, c, rows, k, columns, k).transpose(3, 4).softmax(-1).transpose(3, 4)
    inside = inside.reshape(b, c, rows * k, columns * k)
    if padded.shape[2] > h or padded.shape[3] > w:
        inside = inside[:, :, :h, :w].contiguous()
    return inside


def _whole_rows(x: Tensor, k: int) -> Tensor:
    return x[:, :, : x.shape[2] - x.shape[2] % k, : x.shape[3] // k * k]


def _strided(x: Tensor, k: int) -> Tensor:
    return F.interpolate(x[:, :, ::k, ::k], size=x.shape[2:], mode="nearest") + x


def _pooled(x: Tensor, k: int) -> Tensor:
    small = F.max_pool2d(x, k, ceil_mode=True)
    return F.interpolate(small, size=(x.shape[2], x.shape[3]), mode="bilinear") * x


def _unshuffled(x: Tensor, k: int) -> Tensor:
    h, w = x.shape[2:]
    x = F.pad(x, (0, -w % k, 0, -h % k))
    return F.pixel_shuffle(F.pixel_unshuffle(x, k).tanh(), k)[..., :h, :w]


def _chunks(x: Tensor, k: int) -> Tensor:
    first, *others = x.chunk(2, dim=2 + k % 2)
    return torch.cat([*others, first], dim=2 + k % 2)


def _scanned(x: Tensor, k: int) -> Tensor:
    b, c, h, w = x.shape
    rows = x.flatten(2)
    if (missing := -(h * w) % k) > 0:
        rows = F.pad(rows, (0, missing))
    return rows.view(b, c, -1, k).cumsum(-1).view(b, c, -1)[..., : h * w].view(b, c, h, w)


def _skips(x: Tensor, k: int) -> Tensor:
    down = F.conv2d(x, torch.ones(4, 4, 3, 3) / 36, stride=2, padding=1)
    up = F.interpolate(down, scale_factor=2.0)
    taller, wider = x.shape[2] - up.shape[2], x.shape[3] - up.shape[3]
    if taller != 0 or wider != 0:
        up = F.pad(up, (0, wider, 0, taller))
    return x + up


BLOCKS = (
    _pads_if_needed,
    _pads_each_side,
    _windows,
    _whole_rows,
    _strided,
    _pooled,
    _unshuffled,
    _chunks,
    _scanned,
    _skips,
)


def _taller_than(x: Tensor, k: int) -> Tensor:
    return x * 2 if x.shape[2] > 8 * k else x


def _drops_odd_rows(x: Tensor, k: int) -> Tensor:
    return x[:, :, 1:] if x.shape[2] % k else x


def _of_list(x: Tensor, k: int) -> Tensor:
    return x + k if x.shape[2] in (20, 24, 40) else x


FORKS = (_taller_than, _drops_odd_rows, _of_list)
"""No program computes both of their ways."""


@dataclass(eq=False)
class Chain(torch.nn.Module):
    steps: list[tuple[Block, int]]

    def __post_init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        for block, k in self.steps:
            x = block(x, k)
        return x


def image(b: int, h: int, w: int) -> Tensor:
    return torch.randn(b, 4, h, w, generator=torch.Generator().manual_seed(b + h + w))


def traced(model: torch.nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    shapes = {"x": {axis: f"{name}[{low}:{high}]" for axis, (name, (low, high)) in zip((0, 2, 3), RANGES.items())}}
    spec = ExportSpec(model=model, example_inputs=(x,), dynamic_shapes=shapes)
    task = TracingTask(spec, describe_call(model, (x,), {}))
    return export_judged(task, dynamic_sizes(shapes, task.examples))[0]


def generated(modules: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=modules,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


STEPS = st.lists(st.tuples(st.sampled_from(BLOCKS), st.integers(2, 4)), min_size=1, max_size=2)
EXAMPLE = st.tuples(st.integers(2, 3), st.integers(*SIDES), st.integers(*SIDES))


def check_steps(steps: list[tuple[Block, int]], example: tuple[int, int, int]) -> None:
    model = Chain(steps)
    module = traced(model, image(*example)).module(check_guards=False)
    drawn = random.Random(0)
    for _ in range(8):
        x = image(drawn.randint(1, 3), drawn.randint(*SIDES), drawn.randint(*SIDES))
        torch.testing.assert_close(module(x), model(x))


@generated(6)
@given(STEPS, EXAMPLE)
def test_no_example_refuses_sizes_that_one_program_answers(steps, example) -> None:
    check_steps(steps, example)


@pytest.mark.slow
@generated(200)
@given(STEPS, EXAMPLE)
def test_nor_do_two_hundred_examples(steps, example) -> None:
    check_steps(steps, example)


@pytest.mark.parametrize("fork", FORKS, ids=lambda fork: fork.__name__.strip("_"))
@settings(max_examples=2, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(example=EXAMPLE)
def test_ways_that_no_program_takes_both_are_refused(fork: Block, example: tuple[int, int, int]) -> None:
    with pytest.raises(RefusedByTorchError) as caught:
        traced(Chain([(fork, 3)]), image(*example))
    assert any("than eager at batch=" in each for each in caught.value.tried)


class Chunks(torch.nn.Module):
    """A scan in chunks of 16, of which there may be one: code that reshapes asks for more."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        if (missing := -n % 16) > 0:
            x = F.pad(x, (0, 0, 0, missing))
        rows = x.reshape(b, -1, 16, width)
        return (rows.cumsum(2) + rows.sum(1, keepdim=True)).reshape(b, -1, width)[:, :n]


@pytest.mark.slow
@pytest.mark.process
def test_code_is_right_on_both_sides_of_what_eager_has_judged(tmp_path: Path) -> None:
    shapes = {"x": {0: "batch[1:3]", 1: "n[2:64]"}}
    spec = ExportSpec(model=Chunks(), example_inputs=(torch.randn(2, 40, 8),), dynamic_shapes=shapes)
    (method,) = export_aoti(spec, tmp_path / "chunks.pt2").methods
    tried = method.call.dimensions[1].tried
    assert tried
    assert min(tried) <= 16 < max(tried)
    with load(tmp_path / "chunks.pt2") as model:
        for n in (2, 15, 16, 17, 32, 33, 64):
            x = torch.randn(2, n, 8)
            torch.testing.assert_close(model(x), spec.model(x))
