"""What exportkit translates itself is right, and torch.onnx's own translation is not.

A canary that fails says that upstream is right by now: then the correction goes, and the canary with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import requires
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from exportkit.onnx import convert
from exportkit.onnx.lowering import translations
from tests.export.function_models import spec_of
from tests.onnx.conversions import checked, convert_spec, run, session_of

aten: Any = torch.ops.aten
inf, nan = torch.inf, torch.nan
MANY = torch.tensor([2**53 + 1, 2, 2, 6])  # the product and the sum need more bits than float64 has
ODD, TWO = torch.tensor([2**31 - 1]), torch.tensor([2])
ONE, TENTH = torch.ones(3), torch.tensor([0.1, 0.1, -0.1])
NANS = torch.tensor([2.0, nan, 1.0, 3.0, nan, 0.0])
LATE_NAN, PAIRS = torch.tensor([1.0, nan, inf, -inf]), torch.arange(6.0).reshape(3, 2)
INDEX = torch.tensor([0, 0, 1])
WINDOW = torch.linspace(-1, 1, 12).reshape(4, 1, 3)


def attention(query: Tensor, mask: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)


def scattered(a: Tensor, b: Tensor, reduce: str) -> Tensor:
    return a.scatter_reduce(0, INDEX, b, reduce)


TRUNC, FLOOR = partial(torch.div, rounding_mode="trunc"), partial(torch.div, rounding_mode="floor")
Canary = tuple[Any, Callable[..., Any], tuple[Tensor, ...]]
CANARIES: dict[str, Canary] = {
    "quotient of integers": (aten.div.Tensor_mode, TRUNC, (ODD, TWO)),
    "quotient by a number": (aten.div.Tensor_mode, lambda a: TRUNC(a, 2), (ODD,)),
    "floor of a quotient": (aten.div.Tensor_mode, FLOOR, (ONE, TENTH)),
    "floor division": (aten.floor_divide.default, torch.floor_divide, (ONE, TENTH)),
    "remainder": (aten.remainder.Tensor, torch.remainder, (ONE, TENTH)),
    "remainder by a number": (aten.remainder.Scalar, lambda a: a % 0.1, (ONE,)),
    "remainder of a number": (aten.remainder.Scalar_Tensor, lambda a: torch.remainder(1.0, a), (TENTH,)),
    "sum": (aten.sum.default, lambda a: a.sum(), (MANY,)),
    "sum along an axis": (aten.sum.dim_IntList, lambda a: a.sum(0), (MANY,)),
    "product": (aten.prod.default, lambda a: a.prod(), (MANY,)),
    "product along an axis": (aten.prod.dim_int, lambda a: a.prod(0), (MANY,)),
    "mean of what is scattered": (aten.scatter_reduce.two, partial(scattered, reduce="mean"), (ONE, 10 * TENTH)),
    "NaN is scattered first": (aten.scatter_reduce.two, partial(scattered, reduce="amax"), (ONE, LATE_NAN[1:])),
    "repeated by a size": (
        aten.repeat_interleave.self_int,
        lambda a, b: a.repeat_interleave(b.shape[0], 0),
        (PAIRS, ONE),
    ),
    "signs of zeros": (aten.atan2.default, torch.atan2, (torch.tensor([0.0, -0.0]), torch.tensor([-0.0, -0.0]))),
    "NaN of an angle": (aten.atan2.default, torch.atan2, (LATE_NAN, ONE[:1])),
    "groups of an empty batch": (
        aten.group_norm.default,
        lambda a: functional.group_norm(a, 2),
        (torch.ones(0, 4, 3),),
    ),
    "nothing is seen, booleans": (
        aten.scaled_dot_product_attention.default,
        attention,
        (torch.rand(1, 1, 2, 4), torch.tensor([[True, True], [False, False]])),
    ),
    "nothing is seen, floats": (
        aten.scaled_dot_product_attention.default,
        attention,
        (torch.rand(1, 1, 2, 4), torch.tensor([[0.0, 0.0], [-inf, -inf]])),
    ),
    "clamp": (aten.clamp.default, lambda a: a.clamp(min=2.0), (LATE_NAN,)),
    "clamp from below": (aten.clamp_min.default, lambda a: torch.clamp_min(a, 2.0), (LATE_NAN,)),
    "clamp from below, of an integer": (aten.clamp_min.Tensor, lambda a: torch.clamp_min(a, 2), (LATE_NAN,)),
    "clamp from above": (aten.clamp_max.default, lambda a: torch.clamp_max(a, 2.0), (LATE_NAN,)),
    "clamp from above, of an integer": (aten.clamp_max.Tensor, lambda a: torch.clamp_max(a, 2), (LATE_NAN,)),
    "amax": (aten.amax.default, lambda a: a.amax(0), (LATE_NAN,)),
    "amin": (aten.amin.default, lambda a: a.amin(0), (LATE_NAN,)),
    "max": (aten.max.default, lambda a: a.max(), (LATE_NAN,)),
    "min": (aten.min.default, lambda a: a.min(), (LATE_NAN,)),
    "max along an axis": (aten.max.dim, lambda a: a.max(0).values, (LATE_NAN,)),
    "min along an axis": (aten.min.dim, lambda a: a.min(0).values, (LATE_NAN,)),
    "argmax": (aten.argmax.default, lambda a: a.argmax(0), (LATE_NAN,)),
    "argmin": (aten.argmin.default, lambda a: a.argmin(0), (LATE_NAN,)),
    "gradient of silu": (aten.silu_backward.default, aten.silu_backward, (LATE_NAN[:1], TENTH[2:])),
    "gradient of mish": (aten.mish_backward.default, aten.mish_backward, (LATE_NAN[:1], TENTH[2:])),
    "gradient of a convolution": (
        aten.convolution_backward.default,
        lambda a, b: aten.convolution_backward(a, b, WINDOW, None, [3], [1], [2], False, [0], 2, [True, False, False])[
            0
        ],
        (torch.rand(1, 4, 4), torch.rand(1, 2, 12)),
    ),
    "stable sort": (aten.sort.stable, lambda a: a.sort(dim=0, stable=True).values, (NANS,)),
}


def answer(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tensor:
    """ONNX Runtime's answer. The size of a second input of ones varies."""
    dynamic: Any = {"b": {0: "n[2:9]"}} if inputs[-1] is ONE and len(inputs) > 1 else {}
    named = (lambda a: function(a)) if len(inputs) == 1 else (lambda a, b: function(a, b))
    model = checked(convert_spec(spec_of(named, *inputs, shapes=dynamic)))
    (found,) = run(session_of(model), inputs)
    return found


def same(one: Tensor, other: Tensor) -> bool:
    signs = one.dtype == other.dtype and torch.equal(one.signbit() & ~one.isnan(), other.signbit() & ~other.isnan())
    return signs and torch.allclose(one, other, rtol=1e-6 if one.is_floating_point() else 0, atol=0, equal_nan=True)


def wrong(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> bool:
    """Whether the answer is not torch's, or there is none."""
    try:
        return not same(answer(function, inputs), function(*inputs))
    except Exception:  # whatever torch.onnx, its checker or ONNX Runtime raise
        return True


@pytest.mark.slow_but("argmin", "clamp from above")
@pytest.mark.parametrize(("operator", "function", "inputs"), CANARIES.values(), ids=CANARIES)
def test_a_translation_is_right_and_needed(
    operator: Any, function: Callable[..., Any], inputs: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same(answer(function, inputs), function(*inputs))

    def without(calls: Any) -> dict[Any, Any]:
        return {key: how for key, how in translations(calls).items() if key is not operator}

    monkeypatch.setattr(convert, "translations", without)
    assert wrong(function, inputs), f"torch.onnx translates {operator} rightly by now"


def test_every_translation_has_a_canary_or_is_for_an_older_onnx_runtime() -> None:
    own = {key for key in translations({}) if key.namespace == "aten"}
    assert own == {operator for operator, _, _ in CANARIES.values()} | {aten.sort.default, aten.topk.default}
    allowed = next(each for each in requires("exportkit") or () if each.startswith("onnxruntime>="))
    oldest = tuple(int(part) for part in re.findall(r"\d+", allowed)[:2])
    assert oldest < (1, 32), "TopK orders NaN by now: only `sort.stable` still needs a translation"


@pytest.mark.slow_but("widen_scatters*")
@pytest.mark.parametrize(
    ("repair", "function", "inputs"),
    [
        ("widen_scatters", lambda a, b: a.index_add(0, INDEX, b), (ONE.half(), PAIRS[:, 0].half())),
        (
            "restore_initializers",
            lambda a: a.relu().clamp(0, 6).clamp(1, 5) + a.relu().clamp(0, 4).clamp(1, 3),
            (PAIRS,),
        ),
    ],
)
def test_a_repair_is_right_and_needed(
    repair: str, function: Callable[..., Any], inputs: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same(answer(function, inputs), function(*inputs))
    monkeypatch.setattr(convert, repair, lambda graph: None)
    assert wrong(function, inputs), f"{repair} is not needed by now"
