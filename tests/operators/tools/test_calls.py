"""Calls are found by trial, and varied so that what belonged together still does."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given as for_all
from hypothesis import strategies as st

from exportkit.errors import UsageError
from exportkit.operators.contract.operator_trial import Subject
from exportkit.operators.contract.resizing import with_sizes
from exportkit.operators.contract.sample import Sample
from exportkit.operators.tools.call_search import StopSearch, search_calls
from exportkit.operators.tools.check_worker import calls_of_function
from exportkit.operators.tools.collected_calls import (
    Collector,
    at_sizes,
    code_in_memory,
    in_dtypes,
    in_other_integers,
    watched_calls,
)
from exportkit.operators.tools.forms import arguments_of, draw, tensor_forms
from exportkit.operators.tools.journal import Journal

CPU = torch.device("cpu")
PICKY = torch._C.parse_schema("t::picky(Tensor x, Tensor? weight, Tensor indices, SymInt k, bool flag=False) -> Tensor")


def picky(call: Sample) -> str | None:
    """Refuses as kernels do: one thing at a time, each with a sentence."""
    bound = {
        "weight": None,
        "flag": False,
        **dict(zip(["x", "weight", "indices", "k", "flag"], call.args)),
        **call.kwargs,
    }
    x, weight, indices, k = bound["x"], bound["weight"], bound["indices"], bound["k"]
    if x.dim() != 2:
        return f"x must have 2 dimensions, got {x.dim()}"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"expected half, got {x.dtype}"
    if x.shape[1] % 8 or not x.numel():
        return "the last dimension must be a multiple of 8"
    if weight is not None and (weight.shape != x.shape[1:] or weight.dtype != torch.float32):
        return f"weight must be float32 and have shape [{x.shape[1]}]"
    if indices.dim() != 1 or indices.dtype != torch.int32:
        return "indices must be a vector of int32"
    return None if 1 < k <= x.shape[1] else f"k must be in [2, {x.shape[1]}]"


@pytest.mark.parametrize("seed", range(5))
def test_valid_calls_are_found_by_what_refusals_say(seed):
    search = search_calls(PICKY, picky, CPU, seed)
    assert search.valid
    for form in search.valid:
        assert picky(draw(search.arguments, form, "", CPU)) is None
    names = [argument.name for argument in search.arguments]
    flags = {dict(zip(names, form))["flag"] for form in search.valid}
    weights = {dict(zip(names, form))["weight"] is None for form in search.valid}
    assert flags == {False, True}, "what is valid is tried with other flags"
    assert weights == {False, True}, "and with and without optional tensors"


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ("(Tensor x, int group) -> Tensor", lambda x, group: True),
        ("(Tensor x, int group) -> Tensor", lambda x, group: x.shape[1] % group == 0),
        ("(Tensor x, float eps=0.5, int? k=None) -> Tensor", lambda x, eps=0.5, k=None: True),
        (
            "(Tensor[] xs, Tensor? bias=None, float[]? weights=None) -> Tensor",
            lambda xs, bias=None, weights=None: weights is None or len(weights) == len(xs),
        ),
        ("(Tensor x, Tensor? a, Tensor? b, int? c=None) -> Tensor", lambda x, a=None, b=None, c=None: True),
        ("(Tensor[] xs, Tensor[] ys) -> Tensor", lambda xs, ys: len(xs) == len(ys)),
    ],
)
def test_every_argument_has_other_values_where_they_are_taken(schema, taken):
    parsed = torch._C.parse_schema(f"t::f{schema}")

    def attempt(call: Sample) -> str | None:
        try:
            assert taken(*call.args, **call.kwargs)
        except (AssertionError, IndexError):
            return "no"
        return None

    search = search_calls(parsed, attempt, CPU, 0)
    for index, argument in enumerate(search.arguments):
        values = {form[index] for form in search.valid}
        if argument.listed:
            assert len({len(value or ()) for value in values}) > 1, argument.name
        else:
            assert len(values) > 1, argument.name
    optional = [index for index, argument in enumerate(search.arguments) if argument.optional]
    given = {tuple(form[index] is not None for index in optional) for form in search.valid}
    assert given == set(itertools.product((False, True), repeat=len(optional))), "also together"
    assert len(search.valid) <= 12, "sizes and dtypes are varied, too"


def test_optional_arguments_that_are_taken_only_together_are_given_together():
    def attempt(call: Sample) -> str | None:
        x, a, b = call.args
        if a is None or b is None:
            return None if a is b else "a and b must be given together"
        return None if a.shape == b.shape == x.shape[-1:] else "a and b must have the size of a row"

    schema = torch._C.parse_schema("t::f(Tensor x, Tensor? a, Tensor? b) -> Tensor")
    assert any(None not in form for form in search_calls(schema, attempt, CPU, 0).valid)


def test_some_call_has_a_long_tail_after_its_last_group(tmp_path):
    @torch.library.custom_op("tails::grouped", mutates_args=())
    def grouped(x: torch.Tensor, group: int) -> torch.Tensor:
        return x.clone()

    journal = Journal(tmp_path / "journal", timeout=60.0)
    found = Collector("drawn", grouped._opoverload, journal, [CPU], [torch.float32], [], seed=0, most=24)
    found.drawn()
    assert any(
        x.shape[-1] > 100 and x.shape[-1] % group > 1 for x, group in (call.args for call in found.calls) if x.dim()
    )


def test_a_search_is_bounded_and_says_what_was_tried():
    search = search_calls(PICKY, lambda call: "no", CPU, 0, tries=50)
    assert search.tried == 50
    assert search.summary() == "50 drawn calls were refused, with 1 different messages. 50 times: no"
    patient = search_calls(PICKY, lambda call: "no", CPU, 0, patience=20)
    assert 20 <= patient.tried < 40
    ended = []

    def attempt(call: Sample) -> str | None:
        ended.append(call)
        if len(ended) == 3:
            raise StopSearch
        return "no"

    assert search_calls(PICKY, attempt, CPU, 0).tried == 3


def test_an_argument_of_an_unknown_type_is_named():
    schema = torch._C.parse_schema("t::f(Tensor x, Dict(str, Tensor) named) -> Tensor")
    search = search_calls(schema, lambda call: None, CPU, 0)
    assert search.tried == 0
    assert "named is of type Dict" in search.summary()


def test_every_type_of_a_schema_has_a_value():
    schema = torch._C.parse_schema(
        "t::f(Tensor a, Tensor? b, Tensor[] c, Tensor?[] d, int e, SymInt[2] f, float g, bool h, bool[3] i, str j, "
        "ScalarType k, Device l, Layout m, MemoryFormat n, Scalar o, int? p, Generator? q, *, Tensor(x!) out, "
        "float[] r=[1.0, 2.0], ScalarType s=6) -> ()"
    )
    calls = []
    search_calls(schema, lambda call: calls.append(call), CPU, 0)  # type: ignore[func-returns-value]  # records
    call = calls[0]
    assert isinstance(call.kwargs["out"], torch.Tensor)
    assert "r" not in call.kwargs, "defaults are left out"
    assert [len(call.args[2]), len(call.args[5]), len(call.args[8])] == [2, 2, 3]
    assert call.args[10] is torch.float32


@pytest.mark.parametrize("given", [5, [1], [(torch.ones(2), {})]])
def test_a_function_that_gives_no_calls_is_told_what_calls_are(given):
    with pytest.raises(UsageError, match="not a pair of a tuple and a dict"):
        calls_of_function("calls.py:calls", lambda: given)


def test_a_default_between_given_arguments_does_not_shift_them():
    schema = torch._C.parse_schema("t::f(Tensor x, int k=3, Tensor? y=None, float z=1.0) -> Tensor")
    arguments = arguments_of(schema)
    form = (arguments[0].tensor((2,)), 3, None, 0.5)
    call = draw(arguments, form, "", CPU)
    assert len(call.args) == 1
    assert call.kwargs == {"z": 0.5}
    assert len(tensor_forms(form)) == 1


# --- variations -------------------------------------------------------------------------------------------------------


@for_all(
    sizes=st.tuples(*[st.integers(1, 6)] * 3),
    new=st.integers(0, 9),
    which=st.integers(0, 2),
)
def test_sizes_that_are_equal_stay_equal_and_indices_stay_inside(sizes, new, which):
    torch.manual_seed(0)
    rows, columns, count = sizes
    x, weight = torch.randn(rows, columns), torch.randn(columns)
    indices = torch.randint(0, rows, (count,))
    old = sizes[which]
    other = with_sizes(Sample("", (x, weight, indices, columns), {}), {old: new})
    if other is None:
        assert new == 0, "only an empty dimension leaves indices nothing to point to"
        return
    a, b, i, k = other.args
    assert a.shape[1] == b.shape[0]
    assert a.shape == tuple(new if size == old else size for size in x.shape)
    assert k == (a.shape[1] if columns > 1 else columns)
    assert not i.numel() or int(i.max()) < max(a.shape[0], rows if old != rows else new)
    assert x.shape == (rows, columns), "the call itself does not change"


@for_all(count=st.integers(1, 5), rows=st.integers(2, 9), new=st.integers(1, 12))
def test_offsets_reach_the_size_that_they_reached(count, rows, new):
    offsets = torch.linspace(0, rows, count + 1).floor().long()
    other = with_sizes(Sample("", (torch.randn(rows, 20), offsets), {}), {rows: new} if rows != count + 1 else {})
    assert other is not None
    values, changed = other.args
    assert int(changed.max()) <= values.shape[0]
    assert bool((changed.diff() >= 0).all())


def test_dtypes_change_together_and_others_stay():
    call = Sample("c", (torch.randn(2), torch.randn(2), torch.randn(2).double(), torch.arange(2)), {})
    made = [tuple(t.dtype for t in other.args) for other in in_dtypes(call, (torch.float16, torch.float32))]
    assert made == [
        (torch.float32, torch.float32, torch.float64, torch.int64),
        (torch.float16, torch.float16, torch.float64, torch.int64),
    ]
    assert [other.args[3].dtype for other in in_other_integers(call)] == [torch.int32]
    assert list(in_other_integers(Sample("c", (torch.randn(2),), {}))) == []
    shapes = {tuple(other.args[0].shape) for other in at_sizes(Sample("c", (torch.randn(3, 5),), {}))}
    assert {(3, 131), (7, 5), (0, 5), (67, 517)} <= shapes
    assert list(at_sizes(Sample("c", (1.0,), {}))) == []


# --- what is watched --------------------------------------------------------------------------------------------------


def test_each_other_call_of_an_operator_is_seen_with_its_memory():
    import contextlib

    operator, seen = torch.ops.aten.sin.default, []

    @contextlib.contextmanager
    def see(call: Sample):
        seen.append([tuple(t.stride()) for t in call.args])
        yield

    x = torch.randn(4, 6)
    with watched_calls(operator, see):
        plain = operator(x)
        operator(x)
        operator(x[:, ::2])
        torch.vmap(operator)(x)
        with torch._subclasses.FakeTensorMode() as mode:
            operator(mode.from_tensor(x))
    assert torch.equal(plain, operator(x))
    assert seen == [[(6, 1)], [(6, 2)]]


@pytest.mark.parametrize("place", [slice(0, 2), slice(1, 3)])
def test_a_call_is_written_with_the_place_of_its_tensors_in_memory(place):
    x = torch.arange(12.0).reshape(3, 4)[place, 1::2]
    code = code_in_memory(Subject(torch.ops.aten.sin.default, ()), Sample("", (x,), {}))
    assert torch.equal(eval(code), x.sin())  # noqa: S307 (written by what is tested)
    written = eval(code.removeprefix("torch.ops.aten.sin"))  # noqa: S307 (as above)
    assert written.stride() == x.stride()
    assert written.data_ptr() % 64 == x.data_ptr() % 64
