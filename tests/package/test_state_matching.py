"""Which weights of another fine-tune are taken for which of the model, and what is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exportkit.errors import WeightsError
from exportkit.package.consistency import match_state
from tests.package import samples

KIND = ("float32", (2, 3))
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
