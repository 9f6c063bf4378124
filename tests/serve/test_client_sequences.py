"""A sequence of the client repeats only what the server did not run, and begins again only if told to."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from exportkit.serve.statuses import BackendError, BadRequestError, DeadlineError, SequenceError
from tests.serve import test_client as scripted
from tests.serve.test_client import Client, Reply, X, half, refused, reset, respond, right

server, slept = scripted.server, scripted.slept  # fixtures

SECOND_HAND = [respond(status, b"upstream reset") for status in (429, 502, 503)]  # of a proxy: nobody knows
UNKNOWN = [reset, half, *SECOND_HAND]
LOST = [*UNKNOWN, refused(504), refused(409)]


def starts(server: Any) -> list[bool]:
    return [request["parameters"]["sequence_start"] for request in server.requests]


def test_every_step_has_the_id_and_says_whether_it_begins_or_ends(server: Any):
    with Client(server.url) as client:
        sequence = client.sequence("sum", 7)
        for end in (False, False, True):
            assert sequence.infer(X, end=end)["sum"] == 15
        with pytest.raises(SequenceError, match="the sequence has ended"):
            sequence.infer(X)
        assert client.sequence("sum").id != client.sequence("sum").id
    parameters = [request["parameters"] for request in server.requests]
    assert [each["sequence_id"] for each in parameters] == [7, 7, 7]
    assert [(each["sequence_start"], each["sequence_end"]) for each in parameters] == [
        (True, False),
        (False, False),
        (False, True),
    ]


def ids(server: Any) -> list[int | str]:
    return [request["parameters"]["sequence_id"] for request in server.requests]


def headers(server: Any) -> list[tuple[str | None, str | None]]:
    return [
        tuple(request["headers"].get(f"x-session-{name}") for name in ("id", "replica")) for request in server.requests
    ]


@pytest.mark.parametrize("reply", LOST)
def test_a_step_that_may_have_run_is_not_repeated(reply: Reply, server: Any, slept: list[float]):
    with Client(server.url) as client:
        sequence = client.sequence("sum")
        sequence.infer(X)
        server.replies.append(reply)
        with pytest.raises(SequenceError):
            sequence.infer(X)
        with pytest.raises(SequenceError, match="the sequence is lost"):
            sequence.infer(X)
    assert starts(server) == [True, False]


@pytest.mark.parametrize("reply", LOST)
def test_it_begins_again_if_it_is_told_to(reply: Reply, server: Any, slept: list[float]):
    with Client(server.url) as client:
        sequence = client.sequence("sum", restart=True)
        sequence.infer(X)
        server.replies.append(reply)
        assert sequence.infer(X)["sum"] == 15
        assert sequence.restarts == 1
        sequence.infer(X)
    assert starts(server) == [True, False, True, False]
    first, second, third, fourth = ids(server)
    assert first == second != third == fourth  # another replica may still have the first one's state


@pytest.mark.parametrize("reply", UNKNOWN)
def test_a_first_step_is_sent_until_it_is_answered_each_time_under_a_new_id(
    reply: Reply, server: Any, slept: list[float]
):
    with Client(server.url) as client:
        sequence = client.sequence("sum", "voice")
        server.replies += [reply, reply]
        assert sequence.infer(X)["sum"] == 15
        sequence.infer(X)
        assert (sequence.restarts, sequence.id) == (0, ids(server)[-1])
    assert starts(server) == [True, True, True, False]
    first, second, third, fourth = ids(server)
    assert first == "voice"
    assert len({first, second, third}) == 3
    assert third == fourth


def test_headers_bring_a_step_to_its_replica(server: Any, slept: list[float]):
    with Client(server.url) as client:
        sequence = client.sequence("sum", "caf\u00e9\r\n7", restart=True)
        server.replies.append(named("one"))
        for _ in range(2):
            sequence.infer(X)  # the second answer does not name the replica again
        server.replies.append(refused(409))
        sequence.infer(X)
        client.infer("sum", X)
    assert headers(server) == [
        ("caf%C3%A9%0D%0A7", None),
        ("caf%C3%A9%0D%0A7", "one"),
        ("caf%C3%A9%0D%0A7", "one"),
        (quote(sequence.id), None),
        (None, None),
    ]


def named(replica: str) -> Reply:
    """The right answer, through a proxy that names the replica."""

    def reply(handler: Any) -> None:
        send = handler.send_response
        handler.send_response = lambda status: (send(status), handler.send_header("x-session-replica", replica))
        right(handler)
        del handler.send_response

    return reply


def test_a_step_that_did_not_run_is_sent_again_and_a_refused_one_changes_nothing(server: Any, slept: list[float]):
    with Client(server.url, deadline=100) as client:
        sequence = client.sequence("sum")
        server.replies += [refused(429), refused(503)]
        sequence.infer(X)
        server.replies.append(refused(400))
        with pytest.raises(BadRequestError):
            sequence.infer(X)
        server.replies += [refused(503, Retry_After="99")]
        with pytest.raises(DeadlineError):
            sequence.infer(X, deadline=5)
        sequence.infer(X)
        server.replies.append(refused(500))
        with pytest.raises(BackendError):
            sequence.infer(X)
        with pytest.raises(SequenceError, match="lost"):
            sequence.infer(X)
    assert starts(server) == [True] * 3 + [False] * 4
