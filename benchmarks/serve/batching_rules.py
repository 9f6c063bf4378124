"""The mean batch and the waits of simulated requests, by our rule and by Triton's: the table of ADR 0028.

    python -m benchmarks.serve.batching_rules

Time is simulated, so every machine prints the same. tests/serve/batching/traces.py says what the requests are.
"""

from __future__ import annotations

from tests.serve.batching.simulated_runners import Arrival, Outcome
from tests.serve.batching.traces import alternating, by_both_rules, mixed, one_shape, waits

TRACES: list[tuple[str, list[Arrival], int]] = [
    ("two shapes in turns, 400/s", alternating(400, 3000), 1),
    ("two shapes in turns, 800/s", alternating(800, 3000), 1),
    *((f"six shapes, {rate}/s", mixed(rate, 3000), 2) for rate in (200, 400, 600, 1000)),
    ("one shape, 500/s", one_shape(500, 3000), 1),
]


def figures(outcome: Outcome) -> str:
    waited = waits(outcome)
    median, high = (1000 * waited[len(waited) * part // 100] for part in (50, 99))
    return f"{outcome.mean_rows:.1f} | {median:.0f} ms | {high:.0f} ms"


def main() -> None:
    print("| requests | runners | ours: mean rows | p50 | p99 | Triton's: mean rows | p50 | p99 |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    for name, trace, runners in TRACES:
        ours, theirs = by_both_rules(trace, runners)
        print(f"| {name} | {runners} | {figures(ours)} | {figures(theirs)} |")


if __name__ == "__main__":
    main()
