"""The bucket against one that is counted in fractions, and against what a rate promises."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from exportkit.serve.tenants.token_bucket import TokenBucket

RATES = st.sampled_from([0.25, 1, 3, 7.5, 1000])
CAPACITIES = st.sampled_from([0.5, 1, 2, 10.25, 300])
PAUSES = st.one_of(st.just(0), st.integers(1, 4000).map(lambda ticks: ticks / 1024))
TOKENS = st.integers(1, 50)


class CountedBucket:
    """Tokens that are added and removed, exactly. Nothing of the other one is in it."""

    def __init__(self, rate: float, capacity: float) -> None:
        self.rate, self.capacity = Fraction(rate), max(Fraction(capacity), Fraction(1))
        self.tokens, self.seen = self.capacity, Fraction(0)

    def fill(self, now: float) -> None:
        self.tokens = min(self.capacity, self.tokens + self.rate * (Fraction(now) - self.seen))
        self.seen = Fraction(now)

    def wait(self, now: float) -> Fraction:
        self.fill(now)
        return max(Fraction(0), (1 - self.tokens) / self.rate)


@given(RATES, CAPACITIES, st.lists(st.tuples(PAUSES, TOKENS), max_size=60))
def test_it_says_what_a_counted_one_says(rate: float, capacity: float, asked: list[tuple[float, int]]) -> None:
    bucket, counted, now = TokenBucket(rate, capacity), CountedBucket(rate, capacity), 0.0
    for pause, tokens in asked:
        now += pause
        expected = counted.wait(now)
        assert abs(bucket.wait(now) - expected) < 1e-6
        if bucket.wait(now) == 0:
            bucket.take(now, tokens)
            counted.tokens -= tokens


@given(RATES, CAPACITIES, st.lists(st.tuples(PAUSES, TOKENS), max_size=60))
def test_no_span_of_time_has_more_than_the_rate(rate: float, capacity: float, asked: list[tuple[float, int]]) -> None:
    bucket, now = TokenBucket(rate, capacity), 0.0
    taken: list[tuple[float, int]] = []
    for pause, tokens in asked:
        now += pause
        if bucket.wait(now) == 0:
            bucket.take(now, tokens)
            taken.append((now, tokens))
    for first, (begin, _) in enumerate(taken):
        for last in range(first, len(taken)):
            end, beyond = taken[last]
            total = sum(tokens for _, tokens in taken[first : last + 1])
            assert total <= bucket.capacity + rate * (end - begin) + (beyond - 1) + 1e-6


@given(RATES, CAPACITIES, st.lists(TOKENS, min_size=1, max_size=30), PAUSES)
def test_who_waits_as_long_as_he_is_told_gets_it(rate: float, capacity: float, asked: list[int], now: float) -> None:
    bucket = TokenBucket(rate, capacity)
    for tokens in asked:
        now += bucket.wait(now)
        assert bucket.wait(now) == 0
        bucket.take(now, tokens)


def test_a_long_pause_gives_a_burst_and_no_more() -> None:
    bucket = TokenBucket(2, 4)
    for now in (0.0, 1000.0):
        for _ in range(4):
            assert bucket.wait(now) == 0
            bucket.take(now)
        assert bucket.wait(now) == 0.5
