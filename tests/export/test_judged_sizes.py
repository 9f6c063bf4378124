"""Sizes that one program answers are never refused, and none that it does not: `trace` holds programs against eager.

Conditions that follow from names and ranges are proved, layouts are tried, and from no example is less taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exportkit import ExportSpec
from exportkit.errors import ExportError
from exportkit.export.artifact import export_aoti
from exportkit.export.trace.judged_sizes import export_judged
from exportkit.export.trace.torch_export import RefusedByTorchError
from exportkit.export.trace.traced import Traced
from exportkit.runtime.loader import load
from tests.drawn import examples
from tests.export.function_models import spec_of, traced, tracing_task

Block = Callable[[Tensor], Tensor]

# --- blocks of images, [1 to 3, 4, 16 to 64, 16 to 64], by a number k of pixels ---------------------------------------

SIDES = (16, 64)


def pads_if_needed(x: Tensor, k: int) -> Tensor:
    h, w = x.shape[2:]
    below, right = -h % k, -w % k
    if below > 0 or right > 0:
        x = F.pad(x, (0, right, 0, below))
    return x.cumsum(3)[:, :, :h, :w]


def pads_each_side(x: Tensor, k: int) -> Tensor:
    h, w = x.shape[2:]
    if h % k != 0:
        x = F.pad(x, (0, 0, 0, -h % k), mode="replicate")
    if w % k != 0:
        x = F.pad(x, (0, -w % k))
    return F.avg_pool2d(x, k, 1, k // 2, count_include_pad=False)[:, :, :h, :w]


def windows(x: Tensor, k: int) -> Tensor:
    b, c, h, w = x.shape
    padded = F.pad(x, (0, -w % k, 0, -h % k))
    rows, columns = padded.shape[2] // k, padded.shape[3] // k
    inside = padded.view(b, c, rows, k, columns, k).transpose(3, 4).softmax(-1).transpose(3, 4)
    inside = inside.reshape(b, c, rows * k, columns * k)
    if padded.shape[2] > h or padded.shape[3] > w:
        inside = inside[:, :, :h, :w].contiguous()
    return inside


def whole_rows(x: Tensor, k: int) -> Tensor:
    return x[:, :, : x.shape[2] - x.shape[2] % k, : x.shape[3] // k * k]


def strided(x: Tensor, k: int) -> Tensor:
    return F.interpolate(x[:, :, ::k, ::k], size=x.shape[2:], mode="nearest") + x


def pooled(x: Tensor, k: int) -> Tensor:
    small = F.max_pool2d(x, k, ceil_mode=True)
    return F.interpolate(small, size=(x.shape[2], x.shape[3]), mode="bilinear") * x


def chunks(x: Tensor, k: int) -> Tensor:
    first, *others = x.chunk(2, dim=2 + k % 2)
    return torch.cat([*others, first], dim=2 + k % 2)


def scanned(x: Tensor, k: int) -> Tensor:
    b, c, h, w = x.shape
    rows = x.flatten(2)
    if (missing := -(h * w) % k) > 0:
        rows = F.pad(rows, (0, missing))
    return rows.view(b, c, -1, k).cumsum(-1).view(b, c, -1)[..., : h * w].view(b, c, h, w)


def skips(x: Tensor, k: int) -> Tensor:
    down = F.conv2d(x, torch.ones(4, 4, 3, 3) / 36, stride=2, padding=1)
    up = F.interpolate(down, scale_factor=2.0)
    taller, wider = x.shape[2] - up.shape[2], x.shape[3] - up.shape[3]
    if taller != 0 or wider != 0:
        up = F.pad(up, (0, wider, 0, taller))
    return x + up


IMAGES = (pads_if_needed, pads_each_side, windows, whole_rows, strided, pooled, chunks, scanned, skips)


def taller_than(x: Tensor, k: int) -> Tensor:
    return x * 2 if x.shape[2] > 8 * k else x


def drops_odd_rows(x: Tensor, k: int) -> Tensor:
    return x[:, :, 1:] if x.shape[2] % k else x


def of_list(x: Tensor, k: int) -> Tensor:
    return x + k if x.shape[2] in (20, 24, 40) else x


# --- blocks of sequences, [1 to 8, 2 to 100, 8] -----------------------------------------------------------------------


def halves(x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return torch.cat([x[:, half:], x[:, :half]], 1)


def interleaved(x: Tensor) -> Tensor:
    return torch.cat([x[:, ::2], x[:, 1::2]], 1) + x


def repeated(x: Tensor) -> Tensor:
    b, n, d = x.shape
    return x[:, None].expand(b, 3, n, d).reshape(3 * b, n, d).view(b, 3, n, d).sum(1)


def skewed(x: Tensor) -> Tensor:
    b, n, _ = x.shape
    scores = F.pad(x @ x.transpose(1, 2), (1, 0)).view(b, n + 1, n)[:, 1:].reshape(b, n, n)
    return scores.softmax(-1) @ x


def shifted(x: Tensor) -> Tensor:
    return torch.cat([x[:, :1], x], 1)[:, 1:] + torch.cat([x, x[:, :1]], 1)[:, : x.shape[1]]


def turned(x: Tensor) -> Tensor:
    b, n, d = x.shape
    return x.permute(1, 0, 2).reshape(-1, d).view(n, b, d).permute(1, 0, 2)


def branched(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] <= 128 and min(x.shape[1], 400) == x.shape[1] and (x.shape[1] + 7) // 8 <= 13 else x


def doubled(x: Tensor) -> Tensor:
    both = torch.stack([x, x + 1], 2).flatten(1, 2)
    return both.chunk(2, 1)[0] + both[:, ::2]


def changes(x: Tensor) -> Tensor:
    changed = torch.cat([torch.ones_like(x[:, :1], dtype=torch.bool), x[:, 1:] != x[:, :-1]], 1)
    return torch.where(changed, x, 0)


SEQUENCES = (halves, interleaved, repeated, skewed, shifted, turned, branched, doubled, changes)


def chain(*blocks: Block) -> Block:
    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    return forward


def image(b: int, h: int, w: int) -> Tensor:
    return torch.randn(b, 4, h, w, generator=torch.Generator().manual_seed(b + h + w))


def of_images(block: Block, example: tuple[int, int, int]) -> ExportSpec:
    sizes = {0: "batch[1:3]", 2: f"h[{SIDES[0]}:{SIDES[1]}]", 3: f"w[{SIDES[0]}:{SIDES[1]}]"}
    return spec_of(block, image(*example), shapes={"x": sizes})


def of_sequences(block: Block, n: int = 7) -> ExportSpec:
    return spec_of(block, torch.randn(2, n, 8), shapes={"x": {0: "batch[1:8]", 1: "n[2:100]"}})


def check_images(block: Block, example: tuple[int, int, int]) -> None:
    module = export_judged(*tracing_task(of_images(block, example)))[0].module(check_guards=False)
    drawn = random.Random(0)
    for _ in range(8):
        x = image(drawn.randint(1, 3), drawn.randint(*SIDES), drawn.randint(*SIDES))
        torch.testing.assert_close(module(x), block(x))


def generated(modules: int) -> Any:
    checks = list(HealthCheck)
    return settings(max_examples=modules, derandomize=True, phases=(Phase.generate,), suppress_health_check=checks)


EXAMPLE = st.tuples(st.integers(2, 3), st.integers(*SIDES), st.integers(*SIDES))
STEPS = st.lists(
    st.builds(lambda block, k: partial(block, k=k), st.sampled_from(IMAGES), st.integers(2, 4)), min_size=1, max_size=2
)


@pytest.mark.slow
@generated(200)
@given(STEPS, EXAMPLE)
def test_no_example_refuses_sizes_that_one_program_answers(steps: list[Block], example: tuple[int, int, int]) -> None:
    check_images(chain(*steps), example)


@pytest.mark.slow
@generated(6)
@given(st.lists(st.sampled_from(SEQUENCES), min_size=2, max_size=2, unique=True), st.integers(3, 30))
def test_what_holds_by_construction_is_never_refused(blocks: list[Block], n: int) -> None:
    (method,) = traced(of_sequences(chain(*blocks), n)).methods
    assert {d.name: (d.min, d.max) for d in method.call.dimensions} == {"batch": (1, 8), "n": (2, 100)}


@pytest.mark.slow_but("interleaved", "repeated", "shifted")
@pytest.mark.parametrize("block", SEQUENCES)
def test_the_program_itself_takes_all_declared_sizes(block: Block) -> None:
    """From a small example, and as torch loads it."""
    (method,) = traced(of_sequences(block, n=3)).methods
    for n in (2, 3, 100):
        x = torch.randn(1, n, 8)
        torch.testing.assert_close(method.program.module()(x), block(x))


def test_where_a_layout_is_in_doubt_the_package_has_a_case() -> None:
    found: Traced = traced(of_sequences(halves))
    assert {"batch": 2, "n": 3} in [dict(call.sizes) for case in found.cases for call in case.calls]


@pytest.mark.slow_but("taller_than")
@pytest.mark.parametrize("fork", [taller_than, drops_odd_rows, of_list])
@generated(examples(2))
@given(example=EXAMPLE)
def test_ways_that_no_program_takes_both_are_refused(
    fork: Callable[..., Tensor], example: tuple[int, int, int]
) -> None:
    with pytest.raises(RefusedByTorchError) as caught:
        export_judged(*tracing_task(of_images(chain(partial(fork, k=3)), example)))
    assert any("than eager at batch=" in each for each in caught.value.tried)


@pytest.mark.slow_but("*1", "*100-")
@pytest.mark.parametrize(
    ("block", "needs", "advice"),
    [
        (lambda x: x[:, : x.shape[1] // 2].squeeze(1), "(x:1//2) != 1", "'x:1=n[4:100]'"),
        (lambda x: x * 2 if x.shape[1] // 2 == 1 else x, "(x:1//2) != 1", "'x:1=n[4:100]'"),
        (lambda x: halves(x) if x.shape[0] < 5 else x, "x:0 < 5", "'x:0=batch[1:4]'"),
        (lambda x: x * 2 if x.shape[1] // 2 <= 20 else x, "((x:1//2)) <= 20", "'x:1=n[2:41]'"),
        (lambda x: x.reshape(2, x.shape[1], 8), "x:0 == 2", "x:0=2"),
        (lambda x: x * 2 if x.shape[0] * x.shape[1] <= 100 else x, "x:1*x:0 <= 100", ""),
    ],
)
def test_what_is_untrue_is_refused_and_narrowed_no_more_than_needed(block: Block, needs: str, advice: str) -> None:
    with pytest.raises(ExportError) as caught:
        traced(of_sequences(block))
    assert f"needs {needs}" in caught.value.message
    assert caught.value.message.count("needs") == 1
    hint = caught.value.hint or ""
    assert hint.startswith(f"Write --dynamic {advice} (") if advice else "Change that line" in hint


def test_sizes_that_eager_refuses_are_no_reason_to_refuse_the_others() -> None:
    def legal(x: Tensor) -> Tensor:
        torch._check(x.shape[0] * x.shape[1] <= 100)
        return x * 2

    assert traced(of_sequences(legal))


def in_chunks(x: Tensor) -> Tensor:
    """A scan in chunks of 16, of which there may be one: code that reshapes asks for more."""
    b, n, width = x.shape
    if (missing := -n % 16) > 0:
        x = F.pad(x, (0, 0, 0, missing))
    rows = x.reshape(b, -1, 16, width)
    return (rows.cumsum(2) + rows.sum(1, keepdim=True)).reshape(b, -1, width)[:, :n]


@pytest.mark.slow
def test_code_is_right_on_both_sides_of_what_eager_has_judged(tmp_path: Path) -> None:
    spec = spec_of(in_chunks, torch.randn(2, 40, 8), shapes={"x": {0: "batch[1:3]", 1: "n[2:64]"}})
    (method,) = export_aoti(spec, tmp_path / "chunks.pt2").methods
    tried = method.call.dimensions[1].tried
    assert tried
    assert min(tried) <= 16 < max(tried)
    with load(tmp_path / "chunks.pt2") as model:
        for n in (2, 15, 16, 17, 32, 33, 64):
            x = torch.randn(2, n, 8)
            torch.testing.assert_close(model(x), in_chunks(x))
