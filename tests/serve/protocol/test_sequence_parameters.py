"""The parameters by which a request says which step of which sequence it is."""

from __future__ import annotations

from typing import Any

import pytest

from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.protocol.parameters import scheduling
from exportkit.serve.statuses import BadRequestError


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"sequence_id": -1}, "`sequence_id` of the request is not a whole number"),
        ({"sequence_id": True}, "`sequence_id` of the request is not a whole number"),
        ({"sequence_id": "x" * 129}, "`sequence_id` has 129 characters; 128 are allowed"),
        ({"sequence_id": 1, "sequence_end": 1}, "`sequence_end` of the request is neither true nor"),
        ({"sequence_start": True}, "has no `sequence_id`"),
        ({"sequence_id": 0, "sequence_end": True}, "has no `sequence_id`"),
    ],
)
def test_what_says_no_step_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        scheduling(parameters)


@pytest.mark.parametrize("given", [1, (1 << 64) - 1, "seven", "7"])
def test_a_request_may_be_a_step_of_a_sequence(given: int | str) -> None:
    def step(**parameters: bool) -> SequenceStep | None:
        return scheduling({"sequence_id": given, **parameters}).sequence

    assert step() == SequenceStep(given)
    assert step(sequence_start=True, sequence_end=False) == SequenceStep(given, start=True)
    assert step(sequence_start=False, sequence_end=True) == SequenceStep(given, end=True)


@pytest.mark.parametrize("given", [0, ""])
def test_an_id_that_is_nothing_is_none(given: int | str) -> None:
    assert scheduling({"sequence_id": given}).sequence is None
