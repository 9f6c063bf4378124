"""How many examples Hypothesis draws where each takes long."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """`count`, and in a run without the slow tests a fifth of it."""
    return max(1, count // 5) if os.environ.get("EXPORTKIT_FEW_EXAMPLES") == "1" else count
