"""Edge values: each input has its kinds, and only what every right kernel answers is kept."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch.nn.attention.flex_attention import flex_attention

from exportkit import Tolerance
from exportkit.errors import ModelRunError
from exportkit.export.record.eager_methods import DescribedModel
from exportkit.export.record.edge_values import SPREADING, kinds_of, planned, with_edge_values
from exportkit.export.record.record import MAX_CASES_BYTES, RecordedCase
from exportkit.export.record.rounding import Rounded
from exportkit.export.trace import edge_cases
from exportkit.export.trace.edge_cases import MAX_EDGE_CASES
from exportkit.package.case_files import edge_case_of
from exportkit.verify.layouts import EVEN
from tests.export.function_models import spec_of, traced

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
DTYPES = (*FLOATING, *INTEGERS, torch.float8_e4m3fn)


def drawn(dtype: torch.dtype, shape: tuple[int, ...] = (4, 9)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    low = 0 if dtype in (torch.uint8, torch.bool) else -5
    return torch.randint(low, 2 if dtype is torch.bool else 7, shape, generator=generator).to(dtype)


def changed(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    return with_edge_values(kind, tensor, torch.Generator().manual_seed(2))


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 9), (1,), (), (3, 0)])
def test_every_kind_keeps_shape_and_dtype_and_is_drawn_the_same_again(dtype, shape):
    tensor = drawn(dtype, shape)
    kinds = kinds_of(tensor, keep_integers=False)
    assert bool(kinds) == (tensor.numel() > 0 and dtype is not torch.float8_e4m3fn)
    for kind in kinds:
        one, again = changed(kind, tensor), changed(kind, tensor)
        assert (one.dtype, one.shape) == (dtype, tensor.shape)
        torch.testing.assert_close(one, again, rtol=0, atol=0, equal_nan=True)


PROMISES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "positive values": lambda x: (x > 0).all(),
    "negative values": lambda x: (x < 0).all(),
    "zeros": lambda x: (x == 0).all(),
    "ties": lambda x: torch.tensor(len(x.unique()) <= 3),
    "one value": lambda x: torch.tensor(len(x.unique()) == 1),
    "NaN": lambda x: x.isnan().any() & ~x.isnan().all(),
    "infinities": lambda x: (x == torch.inf).any() & (x == -torch.inf).any() & ~x.isnan().any(),
    "the greatest values": lambda x: (x == torch.finfo(x.dtype).max).any() & x.isfinite().all(),
    "subnormal values": lambda x: ((x != 0) & (x.abs() < torch.finfo(x.dtype).smallest_normal)).any(),
}


def test_kinds_that_are_replayed_with_strides_of_0_have_one_value():
    found = set()
    for dtype in DTYPES:
        for kind in {*kinds_of(drawn(dtype), keep_integers=False)} & {*EVEN}:
            values = changed(kind, drawn(dtype)).flatten()
            assert (values == values[0]).all()
            found.add(kind)
    assert found == set(EVEN)


@pytest.mark.parametrize("kind", PROMISES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_kind_has_what_its_name_says(kind, dtype):
    assert PROMISES[kind](changed(kind, drawn(dtype)))


def test_half_of_the_zeros_are_negative_and_small_integers_have_their_ends():
    assert 0.1 < changed("zeros", drawn(torch.float32, (10, 10))).signbit().float().mean() < 0.9
    ends = changed("the ends of the dtype", drawn(torch.int8))
    assert (int(ends.min()), int(ends.max())) == (-128, 127)
    assert changed("negative values", torch.tensor([-128, 5, 0], dtype=torch.int8)).tolist() == [-128, -5, -1]


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_larger_integers_have_only_values_of_the_example(values):
    tensor = torch.tensor(values)
    for kind in kinds_of(tensor, keep_integers=False):
        assert set(changed(kind, tensor).tolist()) <= set(values)
    assert kinds_of(tensor, keep_integers=True) == ()


@given(st.lists(st.sampled_from((*FLOATING, *INTEGERS)), min_size=1, max_size=5), st.integers(1, 20))
def test_every_input_has_each_of_its_plain_kinds_and_what_spreads_is_alone(dtypes, most):
    kinds = {i: kinds_of(drawn(dtype), keep_integers=False) for i, dtype in enumerate(dtypes)}
    cases = planned(kinds, 1000)
    for place, own in kinds.items():
        assert {case[place] for case in cases if place in case} == set(own)
    assert all(len(case) == 1 for case in cases if set(case.values()) & set(SPREADING))
    assert planned(kinds, most) == cases[:most]


# --- cases ------------------------------------------------------------------------------------------------------------


said: list[str] = []


def recorded(function: Callable[..., torch.Tensor], x: torch.Tensor, **options: Any) -> tuple[RecordedCase, ...]:
    said.clear()
    spec = spec_of(function, x, **options)
    (name,) = inspect.signature(spec.model.forward).parameters
    return traced(dataclasses.replace(spec, dynamic_shapes={name: {0: "batch[1:8]"}}), said).cases


def edge_cases_of(cases: tuple[RecordedCase, ...]) -> list[str]:
    assert all(edge_case_of(case.tensors) == case.edge_case for case in cases)
    return [case.edge_case for case in cases if case.edge_case]


def test_cases_are_small_bounded_named_and_the_same_each_time():
    cases = recorded(lambda x: torch.relu(x) + 1, torch.randn(3, 6))
    names = edge_cases_of(cases)
    assert len(names) == 9 <= MAX_EDGE_CASES
    assert "ties in x" in names
    assert "NaN in x" in names
    assert sum(len(case.tensors) for case in cases) < MAX_CASES_BYTES
    assert said[-2] == "9 edge cases"


def test_ties_of_inputs_are_kept_and_ties_that_rounding_breaks_are_not():
    """Which of equal sums is greatest depends on the order in which they are added."""
    x = torch.randn(3, 6)
    assert {"ties in x", "one value in x", "zeros in x"} <= set(edge_cases_of(recorded(lambda x: x.argmax(-1), x)))
    layer = torch.nn.Linear(6, 5, bias=False).requires_grad_(False)
    kept = edge_cases_of(recorded(lambda x: layer(x).argmax(-1), x))
    assert "zeros in x" in kept  # sums of zeros are equal in any order
    assert any("numerically unstable" in line for line in said) or "one value in x" in kept


def test_indices_stay_in_the_range_of_the_example_and_reach_both_ends():
    cases = recorded(torch.nn.Embedding(10, 4), torch.tensor([[1, 5, 9], [4, 4, 2], [7, 3, 3]]))
    ids = [load(case.tensors)["0.input.0"] for case in cases if case.edge_case]
    assert ids
    assert (min(int(i.min()) for i in ids), max(int(i.max()) for i in ids)) == (1, 9)


def test_what_eager_refuses_is_left_out_and_counted():
    def refusing(x):
        torch._assert_async((x >= 0).all())
        return x.sqrt()

    names = edge_cases_of(recorded(refusing, torch.rand(3, 6)))
    assert not any("negative" in name or "NaN" in name for name in names)
    assert any("that eager refuses" in line for line in said)


def test_where_drawn_values_are_ill_conditioned_a_tolerance_is_needed():
    """Each try calls the model five times: a potential's forces took ten minutes, and none was kept."""
    calls: list[int] = []

    def steep(x):
        calls.append(1)
        return torch.sin((x * 3 + 1) * 1000)

    x = torch.rand(3, 6)
    assert edge_cases_of(recorded(steep, x)) == []
    assert any("numerically unstable in `0`, as drawn values are" in line for line in said), said
    few = len(calls)
    assert len(edge_cases_of(recorded(steep, x, tolerances={"0": Tolerance(atol=0.01, rtol=0)}))) > 3
    assert few < len(calls) - few


def chaotic(x):
    """Each step doubles a difference."""
    for _ in range(60):
        x = 3.9 * x * (1 - x)
    return x


@pytest.mark.slow
def test_an_output_that_eager_itself_does_not_know_is_named_once():
    """A state-space model with random weights in bfloat16 is one: verify found its right code wrong and no more."""
    x = torch.rand(3, 6)
    cases = recorded(chaotic, x)
    assert all(not case.calls[0].accuracy for case in cases if not case.edge_case)
    assert sum("numerically unstable: `0`. " in line for line in said) == 1
    recorded(chaotic, x, tolerances={"0": Tolerance(atol=1, rtol=0)})
    recorded(torch.nn.Tanh(), x)
    assert not any("half of the digits" in line for line in said)


def test_a_cast_of_what_an_integer_cannot_hold_is_left_out():
    names = edge_cases_of(recorded(lambda x: x.to(torch.int32), torch.randn(3, 6)))
    assert "ties in x" in names
    assert not any(kind in name for name in names for kind in ("NaN", "infinities", "greatest"))


def test_a_loop_that_edge_values_would_not_end_has_none():
    def halving(x):
        return torch.while_loop(lambda x: x.max() > 0.5, lambda x: (x / 2,), (x,))[0]

    assert edge_cases_of(recorded(halving, torch.rand(3, 6))) == []
    assert any("may not end" in line for line in said)


def test_edge_cases_do_not_widen_what_is_allowed():
    torch.manual_seed(0)
    cases = recorded(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)), torch.randn(3, 6))
    errors = [[call.accuracy["0"].greatest for call in case.calls] for case in cases if case.edge_case == ""]
    floor = 2e-6
    most = max(2 * max(map(max, errors)), floor)
    assert all(call.accuracy["0"].greatest <= most for case in cases for call in case.calls)


@pytest.mark.slow
def test_attention_with_a_function_can_be_rounded_otherwise():
    """torch compiles the call of its own accord, which it refuses to where operators are watched."""
    assert len(edge_cases_of(recorded(lambda x: flex_attention(x, x, x), torch.randn(3, 2, 16, 16)))) > 3


# --- other rounding ---------------------------------------------------------------------------------------------------


def test_other_rounding_keeps_what_is_exact_and_equal_values_equal():
    x, same = torch.randn(50), torch.full((50,), 0.3)
    with torch.no_grad(), Rounded(0, torch.device("cpu")) as mode:
        moved, doubled, tied, summed = x.relu().flip(0), x * 3, same / 7, x.sum()
    assert torch.equal(moved, x.relu().flip(0))
    assert not torch.equal(doubled, x * 3)
    torch.testing.assert_close(doubled, x * 3, rtol=1e-6, atol=0)
    assert len(tied.unique()) == 1
    assert summed != x.sum()
    assert not mode.undefined
    assert not mode.blends


def test_other_rounding_notices_what_has_no_one_answer():
    for compute, what in ((lambda x: x.int(), "undefined"), (lambda x: x.mean(), "blends")):
        mode = Rounded(0, torch.device("cpu"))
        with torch.no_grad(), mode:
            compute(torch.tensor([1.0, torch.inf]))
        assert getattr(mode, what)


def test_other_rounding_changes_no_weights_whichever_operator_gives_them_back():
    library = torch.library.Library("gives_back", "FRAGMENT")
    library.define("weight(Tensor w) -> Tensor")  # as cuDNN's operator for flat weights does, without saying so
    library.impl("weight", lambda w: w, "CompositeExplicitAutograd")
    weight = torch.randn(5, 10)
    before = weight.clone()
    with torch.no_grad(), Rounded(0, torch.device("cpu"), [weight]):
        given = torch.ops.gives_back.weight(weight)
        found = torch.empty(0).set_(weight.untyped_storage())  # as torch finds cuDNN's flat weights
        weight.mul_(3)
        written = before.clone().mul_(3)
    assert torch.equal(weight, before * 3)
    assert torch.equal(found, weight.flatten())
    assert not torch.equal(given, before)
    torch.testing.assert_close(given, before, rtol=1e-6, atol=0)
    assert not torch.equal(written, before * 3)
    torch.testing.assert_close(written, before * 3, rtol=1e-6, atol=0)


def test_a_kernel_that_ends_the_gpu_s_context_is_named(monkeypatch):
    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(edge_cases._Task, "_answered", lambda *_: None)
    task = edge_cases._Task(DescribedModel(None, (), device=torch.device("cuda")), 0, frozenset(), True)
    with pytest.raises(ModelRunError, match=r"ended the GPU's context .* an illegal memory access was encountered\n"):
        task.run([])
