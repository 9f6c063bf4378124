"""Which weights of another fine-tune are taken for which of the model, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exportkit.errors import WeightsError
from exportkit.export.compile.program_weights import is_dense
from exportkit.package.consistency import match_state
from tests.package import samples, stateful_samples

TIED = samples.weight()
BIAS = samples.weight(name="bias", aliases=(), shape=(3,), strides=(1,))
UNREAD = samples.weight(name="unread", aliases=(), record=None)
CONSTANT = samples.weight(name="positions@12", aliases=(), state=False)
ALL = (TIED, BIAS, UNREAD, CONSTANT)
KIND = ("float32", (2, 3))
STATE = {"head.weight": KIND, "tied.weight": KIND, "bias": ("float32", (3,)), "unread": KIND}


def test_the_whole_state_matches_and_constants_are_none_of_it() -> None:
    assert match_state(ALL, STATE) == {
        "head.weight": ["head.weight", "tied.weight"],
        "bias": ["bias"],
        "unread": ["unread"],
    }


def test_the_state_of_sessions_may_be_there_and_is_left_out() -> None:
    given = {**STATE, "cache.k": ("float32", (64, 4)), "step": ("int64", ())}
    assert match_state(ALL, given, stateful_samples.state()) == match_state(ALL, STATE)
    with pytest.raises(WeightsError, match=r"not in the model: cache\.k, step"):
        match_state(ALL, given)


def test_all_that_is_wrong_is_said_at_once() -> None:
    wrong = {**STATE, "bias": ("float16", (4,)), "positions@12": KIND, "extra": KIND}
    for name in ("head.weight", "tied.weight", "unread"):
        del wrong[name]
    with pytest.raises(WeightsError) as caught:
        match_state(ALL, wrong)
    lines = str(caught.value).splitlines()
    assert lines[:4] == [
        "the weights do not fit the model",
        "  missing: head.weight or tied.weight, unread",
        "  not in the model: extra, positions@12",
        "  wrong dtype or shape: bias is float16[4], not float32[3]",
    ]
    assert caught.value.exit_code == 2


weights = st.lists(st.sets(st.sampled_from("abcdefgh"), min_size=1, max_size=3), max_size=4).filter(
    lambda groups: len(set().union(*groups)) == sum(map(len, groups))
)


@given(weights, st.sets(st.sampled_from("abcdefghij")))
def test_a_state_fits_where_every_weight_has_a_name_in_it_and_every_name_a_weight(
    groups: list[set[str]], given_names: set[str]
) -> None:
    state = [samples.weight(name=min(names), aliases=tuple(sorted(names - {min(names)}))) for names in groups]
    fits = all(names & given_names for names in groups) and given_names <= set().union(*groups)
    try:
        matched = match_state(state, dict.fromkeys(sorted(given_names), KIND))
    except WeightsError:
        assert not fits
    else:
        assert fits
        assert sorted(name for names in matched.values() for name in names) == sorted(given_names)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=4))
def test_dense_strides_are_those_that_address_every_place_once(dimensions: list[tuple[int, int]]) -> None:
    shape, strides = [size for size, _ in dimensions], [stride for _, stride in dimensions]
    places = [0]
    for size, stride in dimensions:
        places = [place + i * stride for place in places for i in range(size)]
    assert is_dense(shape, strides) == (sorted(places) == list(range(len(places))))
