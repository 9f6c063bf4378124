"""A flood of one client delays another one by what runs and no more, and leaves room in the queue."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exportkit.serve.batching.batcher import Batcher, BatcherFullError
from exportkit.serve.batching.tickets import BatchLimits, Ticket

MOST = 8  # rows of a batch
SHAPES = st.integers(0, 2)
ROWS = st.integers(1, MOST)


def queue(rows: int = 100_000) -> Batcher[int]:
    return Batcher(BatchLimits(max_queued_rows=rows), MOST, measured=False)


def ticket(client: str, rows: int = 1, bucket: int = 0) -> Ticket[int]:
    return Ticket(0, bucket, rows, 0, 2, None, 0.0, client)


def ran(batcher: Batcher[int]) -> list[Ticket[int]]:
    batch = batcher.take(0.0)
    return [] if batch is None else list(batch.tickets)


@given(
    flood=st.lists(st.tuples(ROWS, SHAPES), min_size=1, max_size=60),
    taken=st.integers(1, 20),
    rows=ROWS,
    shape=SHAPES,
)
def test_who_asks_for_the_first_time_is_in_the_next_batch(
    flood: list[tuple[int, int]], taken: int, rows: int, shape: int
) -> None:
    """However much another client has in the queue."""
    batcher = queue()
    for size, bucket in flood:
        batcher.submit(ticket("flood", size, bucket))
    for _ in range(taken):
        ran(batcher)
    one = ticket("other", rows, shape)
    batcher.submit(one)
    assert one in ran(batcher)


@given(
    requests=st.lists(st.tuples(st.sampled_from("abc"), ROWS, SHAPES), min_size=30, max_size=120),
)
def test_clients_that_wait_get_the_same_rows(requests: list[tuple[str, int, int]]) -> None:
    batcher = queue()
    for client, rows, _ in requests:
        batcher.submit(ticket(client, rows))
    left = Counter(client for client, _, _ in requests)
    had: Counter[str] = Counter()
    while len([client for client in left if left[client]]) > 1:
        for each in ran(batcher):
            had[each.client] += each.rows
            left[each.client] -= 1
        waiting = [had[client] for client in left if left[client]]
        # What fits into the rest of a batch runs with it, so two may be apart by a batch beside a request of each.
        assert not waiting or max(waiting) - min(waiting) <= 3 * MOST


@given(st.lists(st.tuples(ROWS, st.integers(1, 3)), min_size=1, max_size=40))
def test_one_client_runs_in_its_order(requests: list[tuple[int, int]]) -> None:
    """With a name and without one."""
    orders = []
    for client in ("", "alone"):
        batcher, tickets = queue(), []
        for rows, bucket in requests:
            tickets.append(ticket(client, rows, bucket))
            batcher.submit(tickets[-1])
        order = []
        while batch := ran(batcher):
            order.append([tickets.index(each) for each in batch])
        orders.append(order)
    assert orders[0] == orders[1]


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_whoever_has_nothing_finds_room(clients: int) -> None:
    batcher = queue(rows=600)
    refused: set[str] = set()
    while len(refused) < clients:
        for number in range(clients):
            with suppress(BatcherFullError):
                batcher.submit(ticket(f"flood {number}"))
                continue
            refused.add(f"flood {number}")
    with pytest.raises(BatcherFullError, match="of this API key wait, and the rest is for others"):
        batcher.submit(ticket("flood 0"))
    free = 600 - batcher.queued_rows
    assert abs(free - 600 / (clients + 1)) <= clients
    batcher.submit(ticket("other", MOST))


def test_without_clients_all_of_the_room_is_for_anybody() -> None:
    batcher = queue(rows=10)
    for _ in range(10):
        batcher.submit(ticket(""))
    with pytest.raises(BatcherFullError, match="10 rows wait, and at most 10 may"):
        batcher.submit(ticket(""))
    assert batcher.rows_of("") == 0


def test_what_leaves_counts_no_more() -> None:
    batcher = queue(rows=10)
    tickets = [ticket("one") for _ in range(5)]
    for each in tickets:
        batcher.submit(each)
    assert batcher.rows_of("one") == 5
    batcher.cancel(tickets[0])
    ran(batcher)
    assert batcher.rows_of("one") == 0
