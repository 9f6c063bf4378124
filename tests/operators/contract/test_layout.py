"""Layouts against an oracle that knows nothing of them: a call fits if some size for each name explains every shape."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from exportkit.operators.contract.drawn_refusals import drawn_refusals
from exportkit.operators.contract.layout import Layout

NAMES, SIZES = ("B", "N", "D"), (0, 1, 2, 3)
FAST = settings(max_examples=120, deadline=None)

Written = tuple[bool, tuple[str, ...]]  # whether `...` comes first, and the dimensions


def text_of(alternatives: tuple[Written, ...]) -> str:
    return " | ".join(" ".join([*["..."] * more, *dims]) or "()" for more, dims in alternatives)


def explained(tensors: dict[str, tuple[tuple[Written, ...], tuple[int, ...]]], least: dict[str, int]) -> bool:
    """Whether sizes for the names, and one for `...`, exist that give each tensor its shape. Tries them all."""
    sizes = {size for _, shape in tensors.values() for size in shape}
    before = {shape[:cut] for _, shape in tensors.values() for cut in range(len(shape) + 1)}
    for chosen in itertools.product(sorted(sizes), repeat=len(NAMES)):
        value = dict(zip(NAMES, chosen))
        if any(value[name] < size for name, size in least.items() if used(name, tensors)):
            continue
        for leading in before:
            if all(
                any((*(leading if more else ()), *(value.get(d, 0) if d in value else int(d) for d in dims)) == shape
                    for more, dims in alternatives)
                for alternatives, shape in tensors.values()
            ):  # fmt: skip
                return True
    return not sizes and all(any(not dims for _, dims in alternatives) for alternatives, _ in tensors.values())


def used(name: str, tensors: dict[str, tuple[tuple[Written, ...], tuple[int, ...]]]) -> bool:
    """Whether a name stands for a size of a given tensor. Alternatives differ in rank."""
    return any(
        name in dims
        for alternatives, shape in tensors.values()
        for more, dims in alternatives
        if len(shape) == len(dims) or (more and len(shape) > len(dims))
    )


dims = st.lists(st.sampled_from([*NAMES, "1", "3"]), min_size=1, max_size=3).map(tuple)


@st.composite
def calls(draw: Any) -> tuple[dict[str, tuple[tuple[Written, ...], tuple[int, ...]]], dict[str, int]]:
    """Up to three tensors: shapes that fit, one of which may then be changed."""
    value = {name: draw(st.sampled_from(SIZES)) for name in NAMES}
    leading = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=2)))
    tensors = {}
    for name in ("x", "y", "z")[: draw(st.integers(1, 3))]:
        written: tuple[Written, ...] = ((draw(st.booleans()), draw(dims)),)
        if not written[0][0] and draw(st.integers(0, 3)) == 0:
            other = draw(dims)
            written = ((False, other), *written) if len(other) != len(written[0][1]) else written
        more, last = draw(st.sampled_from(written))
        shape = (*(leading if more else ()), *(value[d] if d in value else int(d) for d in last))
        if draw(st.integers(0, 2)) == 0:
            place = draw(st.integers(0, len(shape) - 1))
            changed = draw(st.sampled_from([(), (1,), (2,), (3,)]))
            shape = (*shape[:place], *changed, *shape[place + 1 :])
        tensors[name] = (written, shape)
    written_names = {name for alternatives, _ in tensors.values() for _, last in alternatives for name in last}
    least = draw(st.sampled_from([{}, {"D": 1}, {"B": 2, "N": 1}]))
    return tensors, {name: size for name, size in least.items() if name in written_names}


@FAST
@given(calls())
def test_a_call_is_taken_exactly_if_sizes_explain_it(drawn: Any):
    tensors, least = drawn
    layout = Layout({name: text_of(written) for name, (written, _) in tensors.items()}, least=least)
    arguments = {name: torch.empty(shape, device="meta") for name, (_, shape) in tensors.items()}
    if explained(tensors, least):
        layout.check("op", arguments)
    else:
        with pytest.raises(RuntimeError, match=r"op: [xyz] (must be|must have|has) "):
            layout.check("op", arguments)


@FAST
@given(st.tuples(*[st.integers(2, 4)] * 4), st.lists(st.sampled_from(["B", "N", "D", "k", "3"]), max_size=4))
def test_results_have_the_sizes_of_the_arguments(sizes: tuple[int, ...], written: list[str]):
    value = dict(zip(("B", "N", "D", "k"), sizes))
    x, y = torch.empty(sizes[:2], device="meta"), torch.empty(sizes[1:3], device="meta", dtype=torch.int64)
    layout = Layout({"x": "B N", "y": "N D: int64"}, outputs=[" ".join(written) or "()", "like y", "D: like y"])
    first, second, third = layout.fake("op", {"x": x, "y": y, "k": sizes[3]})
    assert list(first.shape) == [value.get(d, 3) for d in written]
    assert (second.shape, second.dtype, third.shape, third.dtype) == (y.shape, y.dtype, (value["D"],), y.dtype)


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", DTYPES)
def test_dtypes(first: torch.dtype, second: torch.dtype):
    x, y = torch.empty(2, dtype=first), torch.empty(2, dtype=second)
    wide = torch.float64 if first == torch.float64 else torch.float32
    rules = {"": second == first, ": floating": second.is_floating_point, ": int64": second == torch.int64}
    rules |= {": bool": second == torch.bool, ": accumulated": second == wide}
    for suffix, fits in rules.items():
        layout = Layout({"x": "B", "y": f"B{suffix}"}, outputs=["B", "B: accumulated", "B: int8"])
        if first.is_floating_point and fits:
            assert [r.dtype for r in layout.fake("op", {"x": x, "y": y})] == [first, wide, torch.int8]
        else:
            with pytest.raises(RuntimeError, match=r"op: [xy] (must be|is) .*(bool|int\d+|float\d+)"):
                layout.fake("op", {"x": x, "y": y})


def test_a_tensor_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match="op: y and x must be on one device"):
        Layout({"x": "B", "y": "B"}).check("op", {"x": torch.empty(2), "y": torch.empty(2, device="meta")})


@FAST
@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.integers(-1, 4))
def test_a_derived_size_is_checked_with_exact_divisions(height: int, width: int, count: int, patch: int):
    layout = Layout(
        {"image": "H W", "x": "N"},
        outputs=["H/patch W/patch"],
        numbers={"patch": ">= 1"},
        derived={"N": ("the grid", "(H/patch) * (W/patch)")},
    )
    call = {"image": torch.empty(height, width), "x": torch.empty(count), "patch": patch}
    grid = [(h, w) for h in range(9) for w in range(9) if patch > 0 and (h * patch, w * patch) == (height, width)]
    if grid and grid[0][0] * grid[0][1] == count:
        assert layout.fake("op", call).shape == grid[0]
    else:
        with pytest.raises(RuntimeError, match=r"op: (patch must be >= 1|[HW] = . is not a multiple of|x has N = )"):
            layout.fake("op", call)


MASKED = Layout({"x": "B N", "query": "B D | B T D", "mask": "query.B query.T: bool"})


def test_an_optional_tensor_may_be_missing_and_goes_with_one_shape_of_another():
    x, tokens, row = torch.empty(2, 3), torch.empty(2, 4, 5), torch.empty(2, 5)
    mask = torch.ones(2, 4, dtype=torch.bool)
    for query, given_mask in [(tokens, mask), (tokens, None), (row, None)]:
        MASKED.check("op", {"x": x, "query": query, "mask": given_mask})
    with pytest.raises(RuntimeError, match=r"op: mask needs a query \[B, T, D\], got query of shape \[2, 5\]"):
        MASKED.check("op", {"x": x, "query": row, "mask": mask})


def test_errors_name_the_tensor_that_sizes_are_compared_with():
    x, query, mask = torch.empty(2, 3), torch.empty(2, 4, 5), torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="op: mask has B = 1, query has B = 2; they must be equal"):
        MASKED.check("op", {"x": x, "query": query, "mask": mask})
    with pytest.raises(RuntimeError, match=r"op: s must be \[B\] of x \[2, 3\], got shape \[3\]"):
        Layout({"x": "B N", "s": "B of x"}).check("op", {"x": x, "s": torch.empty(3)})


@pytest.mark.parametrize("text", ["", " ", "B |", "B: int64: bool", "B:", "B of", "B, N", "[B N]", "N-1"])
def test_what_is_not_a_layout_is_refused_where_it_is_written(text: str):
    with pytest.raises(ValueError, match=r"is not (the layout of a tensor|a shape)"):
        Layout({"x": text})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"inputs": {"x": "B: int46"}}, "'int46' is not a dtype"),
        ({"inputs": {"x": "like y"}}, "is the layout of a result"),
        ({"inputs": {"x": "B if need_x"}}, "is the layout of a result"),
        ({"inputs": {"x": "B"}, "outputs": "B"}, r"outputs must be a list, such as \['B'\]"),
        ({"inputs": {"x": "B"}, "outputs": ["B | 3"]}, "is the layout of an input"),
        ({"inputs": {"x": "B"}, "outputs": ["B: floating"]}, "is the layout of an input"),
        ({"inputs": {"x": "B"}, "outputs": ["like y"]}, "names 'y', which is not one of its inputs: x"),
        ({"inputs": {"x": "B", "m": "y.B"}}, "names 'y', which is not one of its inputs: x, m"),
        ({"inputs": {"x": "B"}, "least": {"N": 1}}, "a rule for 'N', which is not a size"),
        ({"inputs": {"x": "B"}, "derived": {"N": ("it", "2")}}, "a rule for 'N', which is not a size"),
        ({"numbers": {"k": "at least 2"}}, "is not a rule for k"),
    ],
)
def test_a_mistake_is_refused_where_it_is_written(wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Layout(**wrong)


def test_a_result_with_an_unknown_size_is_refused():
    with pytest.raises(ValueError, match="op: the layout names 'N', which is neither a size nor an argument"):
        Layout({"x": "B"}, outputs=["N"]).fake("op", {"x": torch.empty(2)})


def test_every_rule_of_a_layout_is_broken_once():
    first = Layout({"x": "B N D"}, least={"D": 1}, numbers={"by": "> 0"})
    layout = Layout(
        {"y": "B D", "w": "3 | B 3", "at": "B k: int64"}, derived={"N": ("the grid", "k * k")}, after={"first": first}
    )
    call = {"x": torch.empty(2, 4, 5), "y": torch.empty(2, 5), "w": torch.empty(2, 3), "by": 0.5}
    call |= {"at": torch.empty(2, 2, dtype=torch.int64)}
    layout.check("op", call)
    messages = [message for _, _, message in drawn_refusals("op", layout, call)]
    assert messages == [
        "first: x must be float32, float64, float16 or bfloat16, got int64",
        "first: x must be [B, N, D], got shape [1, 2, 4, 5]",
        "first: x must have D >= 1, got shape [2, 4, 0]",
        "op: y is float64, x is float32; they must have one dtype",
        "op: y must be [B, D], got shape [1, 2, 5]",
        "op: y has B = 3, x has B = 2; they must be equal",
        "op: y has D = 6, x has D = 5; they must be equal",
        "op: w is float64, x is float32; they must have one dtype",
        "op: w must be [3] or [B, 3], got shape [1, 2, 3]",
        "op: w has B = 3, x has B = 2; they must be equal",
        "op: w must be [3] or [B, 3], got shape [2, 4]",
        "op: at must be int64, got int32",
        "op: at must be [B, k], got shape [1, 2, 2]",
        "op: at has B = 3, x has B = 2; they must be equal",
        "first: by must be > 0, got 0",
        "first: by must be > 0, got -0.5",
        "first: by must be > 0, got nan",
        "op: x has N = 5, the grid has N = 4; they must be equal",
    ]


def test_a_layout_that_takes_a_wrong_call_is_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("exportkit.operators.contract.layout._Checks.dtype_and_device", lambda *_: None)
    with pytest.raises(AssertionError, match="op: the layout takes a call with x of another dtype"):
        list(drawn_refusals("op", Layout({"x": "B"}), {"x": torch.empty(2)}))


def test_checks_of_sizes_that_vary_add_the_equalities_and_nothing_else():
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)

    def varying(name: str, *shape: int) -> torch.Tensor:
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(shape))
        return mode.from_tensor(torch.empty(shape), symbolic_context=context, source=ConstantSource(name))

    x, y, image = varying("x", 5, 6, 7), varying("y", 5, 7), varying("image", 4, 9)
    equal = {frozenset(map(str, pair)) for pair in [(x.shape[0], y.shape[0]), (x.shape[2], y.shape[1])]}
    layout = Layout({"x": "B N D", "y": "B D", "image": "H W"}, outputs=["B N", "H W"], least={"D": 1})
    first, second = layout.fake("op", {"x": x, "y": y, "image": image})
    assert (first.shape, second.shape) == (x.shape[:2], image.shape)
    assert {frozenset(map(str, guard.expr.free_symbols)) for guard in shape_env.guards} == equal
    assert {type(guard.expr).__name__ for guard in shape_env.guards} == {"Equality"}
