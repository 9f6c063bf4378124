from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from exportkit import sizes as module
from exportkit.export.models.option_parsing import parse_expression
from exportkit.package.manifest import Call, Dimension, Size, TensorInput, TensorNode
from exportkit.sizes import input_bytes, label_of, plan_sizes

MEGABYTE = 10**6


def call(dimensions, *shapes, dtype="float32"):
    """A call that takes a tensor of each shape; a string in a shape is a dimension, `16*d` a multiple of one."""

    def size(text):
        if isinstance(text, int):
            return text
        scale, _, name = text.rpartition("*")
        return Size(dimension=name, scale=int(scale or 1))

    return Call(
        parameters=(),
        inputs=tuple(
            TensorInput(name=str(i), dtype=dtype, shape=tuple(map(size, s)), written=None) for i, s in enumerate(shapes)
        ),
        result=TensorNode(index=0),
        outputs=(),
        dimensions=tuple(Dimension(name=n, min=a, max=b) for n, (a, b) in dimensions.items()),
    )


IMAGE = call({"batch": (1, 64), "gh": (8, 96), "gw": (8, 96)}, ("batch", 3, "16*gh", "16*gw"))


@given(st.integers(1, 50), st.integers(-50, 50), st.integers(0, 10**6))
def test_a_size_and_its_number_determine_each_other(scale, offset, number):
    size = Size(dimension="n", scale=scale, offset=offset)
    assert size.number_of(size.at({"n": number})) == number
    assert parse_expression(str(size)) == (size, None)
    assert scale == 1 or size.number_of(size.at({"n": number}) + 1) is None


@pytest.mark.parametrize(
    ("dimensions", "shape", "count", "limit", "sizes", "skipped"),
    [
        # the ends of every range, but only those that there is room for
        ({"a": (1, 9), "b": (2, 7)}, ("a", "b"), 4, MEGABYTE, [(1, 2), (9, 2), (1, 7), (9, 7)], []),
        ({"a": (1, 9), "b": (1, 10**9)}, ("a", "b"), 2, MEGABYTE, [(1, 1), (9, 1)], []),
        # an end that is too large is named and replaced by the largest that fits
        ({"n": (1, 10**9)}, ("n",), 2, 400, [(1,), (100,)], ["n=1000000000: its inputs take 4.0 GB"]),
        ({"n": (1, 2**62)}, ("n",), 2, 400, [(1,), (100,)], [f"n={2**62}: its inputs take more than 2^63 bytes"]),
        # fixed sizes are one call, and a range with few members gives each once
        ({}, (2, 3), 8, MEGABYTE, [()], []),
        ({"n": (3, 5)}, ("n",), 50, MEGABYTE, [(3,), (5,), (4,)], []),
    ],
)
def test_which_sizes_are_chosen(dimensions, shape, count, limit, sizes, skipped):
    plan = plan_sizes(call(dimensions, shape), count, seed=0, max_bytes=limit)
    assert [tuple(chosen.values()) for chosen in plan.sizes] == sizes
    assert plan.skipped == tuple(f"{text}, more than the limit of {limit} bytes" for text in skipped)


def test_fixed_sizes_have_a_label():
    assert label_of({}) == "the exported sizes"


def test_half_of_the_drawn_sizes_are_where_a_condition_was_tried():
    taken = call({"n": (1, 10**6)}, ("n",))
    (dimension,) = taken.dimensions
    tried = structs.replace(taken, dimensions=(structs.replace(dimension, tried=(64, 65)),))
    drawn = [sizes["n"] for sizes in plan_sizes(tried, 12, seed=0, max_bytes=8 * MEGABYTE).sizes]
    assert {64, 65} < set(drawn)
    assert len(drawn) == 12


def test_nothing_is_chosen_where_even_the_smallest_inputs_are_too_large():
    vast = call({"n": (2**62, 2**62)}, ("n", "n"))
    for planned, said in ((IMAGE, "even at the smallest"), (vast, "more than 2^63 bytes")):
        plan = plan_sizes(planned, 8, seed=0, max_bytes=1000)
        assert plan.sizes == ()
        assert said in plan.skipped[0]


def test_the_same_seed_draws_the_same_sizes_and_another_seed_others():
    first, again, other = (plan_sizes(IMAGE, 12, seed=s, max_bytes=64 * MEGABYTE).sizes for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_item_sizes_follow_from_the_dtype_names():
    sizes = {"float32": 40, "bfloat16": 20, "int64": 80, "bool": 10, "float8_e4m3fn": 10, "complex64": 80}
    assert {name: input_bytes(call({}, (10,), dtype=name), {}) for name in sizes} == sizes


def looked_at(monkeypatch, planned, count):
    """The plan, and how many sizes of shapes were looked at for it."""
    seen = []

    def counted(call, sizes):
        seen.append(sum(len(tensor.shape) for tensor in call.inputs))
        return input_bytes(call, sizes)

    monkeypatch.setattr(module, "input_bytes", counted)
    return plan_sizes(planned, count, seed=0, max_bytes=MEGABYTE), sum(seen)


@pytest.mark.parametrize(
    "shapes",
    [
        [(f"d{i}",) for i in range(500)],  # an input for each dimension
        [tuple(f"d{i + k}" for k in range(20)) for i in range(0, 500, 20)],  # inputs of many dimensions
        [("d0",)] * 2000 + [(f"d{i}",) for i in range(500)],  # many inputs of one dimension
    ],
)
def test_the_work_is_bounded_whatever_a_manifest_says(monkeypatch, shapes):
    work, count = 20_000, 8
    monkeypatch.setattr(module, "WORK", work)
    hostile = call({f"d{i}": (1, 2**62) for i in range(500)}, *shapes)
    plan, done = looked_at(monkeypatch, hostile, count)
    assert done <= work * count
    assert plan.sizes[0] == {f"d{i}": 1 for i in range(500)}
    assert all(input_bytes(hostile, sizes) <= MEGABYTE for sizes in plan.sizes)
    if len(plan.sizes) < count:
        assert plan.skipped[-1] == f"{count - len(plan.sizes)} of 8 sizes: 500 dimensions are too many to draw more"


def test_a_model_of_many_inputs_is_not_what_the_bound_is_for(monkeypatch):
    large = call({"batch": (1, 64), "rows": (1, 4096), "columns": (1, 4096)}, *[("batch", 3, "rows", "columns")] * 100)
    plan, done = looked_at(monkeypatch, large, 8)
    assert len(plan.sizes) == 8
    assert done < 8 * module.WORK / 4


@settings(deadline=None, max_examples=60)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**6)), min_size=1, max_size=4),
    count=st.integers(1, 12),
    limit=st.integers(1, 10**7),
    seed=st.integers(0, 10),
)
def test_every_size_lies_in_its_range_and_within_the_budget(ranges, count, limit, seed):
    dimensions = {f"d{i}": (low, low + extra) for i, (low, extra) in enumerate(ranges)}
    planned = call(dimensions, tuple(dimensions), (f"2*{next(iter(dimensions))}", 3))
    plan = plan_sizes(planned, count, seed=seed, max_bytes=limit)
    assert len(plan.sizes) <= count
    for sizes in plan.sizes:
        assert all(low <= sizes[name] <= high for name, (low, high) in dimensions.items())
        assert input_bytes(planned, sizes) <= limit
