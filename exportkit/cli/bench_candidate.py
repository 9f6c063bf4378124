"""`exportkit bench ops --candidate`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from exportkit.cli.ops_check import of_operators, seed_given

if TYPE_CHECKING:
    from exportkit.bench.results import Row
    from exportkit.operators.tools.timed_candidate import TimedCall


def candidate_rows(source: str, references: Sequence[str], calls: Sequence[str], step: Any, **options: Any) -> Any:
    """Returns a function that times kernels beside their references: (device, rate) -> rows."""
    import msgspec

    from exportkit.operators.tools.candidate import drawn_seed
    from exportkit.operators.tools.checking import CheckOptions
    from exportkit.operators.tools.source import parse_source
    from exportkit.operators.tools.timed_candidate import timed

    if not references or not calls:
        raise click.UsageError(
            "--candidate needs --reference NS::OP=FILE.py:FUNCTION, and --calls NS::OP=FILE.py:FUNCTION, which yields "
            "what to time."
        )
    others = ("sizes", "method", "cuda_graphs", "onnx", "dtype", "threads")
    if given := [name for name in others if options[name]]:
        raise click.UsageError(f"--{given[0].rstrip('s').replace('_', '-')} cannot be given with --candidate.")
    against = options["against"] or ("eager", "compile")
    if unknown := [name for name in against if name not in ("eager", "compile")]:
        raise click.UsageError(f"--against {unknown[0]} is not for --candidate; eager and compile are.")
    chosen = CheckOptions(
        references=dict(of_operators("--reference", references, ())),
        calls=dict(of_operators("--calls", calls, ())),
        libraries=tuple(map(str, options["eager"].op_libraries)),
        seed=options["seed"] if seed_given() else drawn_seed(),
    )

    def rows(device: Any, rate: Callable[[], float]) -> Iterator[Row]:
        placed = msgspec.structs.replace(chosen, device=str(device))
        for call in timed(parse_source(source, models=False), placed, against, options["seconds"], step):
            yield _row(call, rate())

    return rows


def _row(call: TimedCall, rate: float) -> Row:
    from exportkit.bench.results import Measurement, Row, Timing
    from exportkit.operators.tools.timed_candidate import CANDIDATE

    low, high = min(call.clocks), max(call.clocks)
    clock = f"the clock was at {low:.0f} to {high:.0f} MHz" if high else "the clock is not known"
    measurements = []
    for name, milliseconds in call.milliseconds.items():
        q1, median, q3 = statistics.quantiles(milliseconds, n=4, method="inclusive")
        own = name == CANDIDATE
        measurements.append(
            Measurement(
                name,
                call.operator if own else f"{name} of the reference",
                call=Timing(median, q1, q3, len(milliseconds)),
                note=f"caches were filled with other data before each call; {clock}" if own else None,
            )
        )
    limit = call.moved_bytes / rate / 1e6
    return Row(call.operator, call.sizes, call.dtype, "forward", call.moved_bytes, limit, tuple(measurements))
