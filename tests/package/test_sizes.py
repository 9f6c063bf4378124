from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from exportkit.package.manifest import Call, Dimension, Size, TensorInput, TensorNode
from exportkit.package.sizes import input_bytes, label_of, plan_sizes

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
        inputs=tuple(TensorInput(name=str(i), dtype=dtype, shape=tuple(map(size, s))) for i, s in enumerate(shapes)),
        result=TensorNode(index=0),
        outputs=(),
        dimensions=tuple(Dimension(name=n, min=a, max=b) for n, (a, b) in dimensions.items()),
    )


IMAGE = call({"batch": (1, 64), "gh": (8, 96), "gw": (8, 96)}, ("batch", 3, "16*gh", "16*gw"))


def test_the_ends_of_every_range_are_among_the_sizes():
    plan = plan_sizes(call({"a": (1, 9), "b": (2, 7)}, ("a", "b")), 6, seed=0, max_bytes=MEGABYTE)
    assert plan.skipped == ()
    assert plan.sizes[:4] == ({"a": 1, "b": 2}, {"a": 9, "b": 2}, {"a": 1, "b": 7}, {"a": 9, "b": 7})
    assert len(plan.sizes) == 6


def test_an_end_that_is_too_large_is_named_and_replaced_by_the_largest_that_fits():
    plan = plan_sizes(call({"n": (1, 10**9)}, ("n",)), 2, seed=0, max_bytes=400)
    assert plan.sizes == ({"n": 1}, {"n": 100})
    assert plan.skipped == ("n=1000000000: its inputs take 4.0 GB, more than the limit of 400 bytes",)


def test_nothing_is_chosen_where_even_the_smallest_inputs_are_too_large():
    plan = plan_sizes(IMAGE, 8, seed=0, max_bytes=1000)
    assert plan.sizes == ()
    assert "even at the smallest sizes" in plan.skipped[0]


def test_fixed_sizes_are_one_call():
    plan = plan_sizes(call({}, (2, 3)), 8, seed=0, max_bytes=MEGABYTE)
    assert plan.sizes == ({},)
    assert label_of({}) == "the exported sizes"


def test_a_range_with_few_members_gives_each_once():
    plan = plan_sizes(call({"n": (3, 5)}, ("n",)), 50, seed=0, max_bytes=MEGABYTE)
    assert sorted(sizes["n"] for sizes in plan.sizes) == [3, 4, 5]


def test_the_same_seed_draws_the_same_sizes_and_another_seed_others():
    first, again, other = (plan_sizes(IMAGE, 12, seed=s, max_bytes=64 * MEGABYTE).sizes for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_item_sizes_follow_from_the_dtype_names():
    sizes = {name: input_bytes(call({}, (10,), dtype=name), {}) for name in ("float32", "bfloat16", "int64", "bool")}
    assert sizes == {"float32": 40, "bfloat16": 20, "int64": 80, "bool": 10}
    assert input_bytes(call({}, (10,), dtype="float8_e4m3fn"), {}) == 10
    assert input_bytes(call({}, (10,), dtype="complex64"), {}) == 80


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
