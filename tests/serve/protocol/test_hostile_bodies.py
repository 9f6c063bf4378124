from __future__ import annotations

import random

from tests.drawn import examples
from tests.serve.protocol.hostile_bodies import make, survives


def test_no_body_raises_what_is_not_ours() -> None:
    """benchmarks/serve/fuzz_protocol.py tries a million."""
    chance, bodies = random.Random(0), examples(20_000)
    requests = sum(survives(*make(chance)) for _ in range(bodies))
    assert 0.1 < requests / bodies < 0.9  # the changes reach both what is read and what is refused
