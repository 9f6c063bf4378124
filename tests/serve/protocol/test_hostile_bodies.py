from __future__ import annotations

import random

from tests.serve.protocol.hostile_bodies import make, survives


def test_no_body_raises_what_is_not_ours() -> None:
    """benchmarks/serve/fuzz_protocol.py tries a million."""
    chance = random.Random(0)
    requests = sum(survives(*make(chance)) for _ in range(20_000))
    assert 2_000 < requests < 18_000  # the changes reach both what is read and what is refused
