"""The tables of benchmarks/serve/load.py: medians over its rounds."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial

Figures = dict[str, float]
Round = dict[
    str, dict[str, Figures]
]  # engine, then measurement; "direct" has the seconds of a call for each number of rows


def print_one(engines: Sequence[str], rounds: Sequence[Round]) -> None:
    """Prints what one request at a time takes. `beside the model` is without the time of a direct call."""
    print("| engine | p50 | p99 | beside the model | of echo | CPU |")
    print("| --- | --: | --: | --: | --: | --: |")
    for engine in engines:
        figures = [figure(engine, "one", name) for name in ("p50", "p99")]
        figures += [beside(engine), _of_echo(engine)]
        p50, p99, more, ratio, cpu = (median(rounds, f) for f in [*figures, figure(engine, "one", "cpu")])
        print(f"| {engine} | {ms(p50)} | {ms(p99)} | {ms(more)} | {ratio:.1f} | {ms(cpu)} |")


def print_many(engines: Sequence[str], rounds: Sequence[Round]) -> None:
    """Prints what many requests get, at saturation and at half load, and what direct calls take."""
    print("| engine | rows/s | of the fastest direct calls | failed | half load: p50 | p99 |")
    print("| --- | --: | --: | --: | --: | --: |")
    for engine in engines:
        if engine != "echo":
            rate, part, failed = (
                median(rounds, figure(engine, "saturation", "rows_per_second")),
                median(rounds, _of_fastest(engine)),
                median(rounds, figure(engine, "saturation", "failed")),
            )
            p50, p99 = (median(rounds, figure(engine, "half load", name)) for name in ("p50", "p99"))
            print(f"| {engine} | {_number(rate)} | {_number(part, 2)} | {_number(failed)} | {ms(p50)} | {ms(p99)} |")
    print()
    for engine in filter("exportkit".__eq__, engines):
        same = median(rounds, partial(same_rows, engine=engine))
        rows = median(rounds, partial(_mean_rows, engine=engine))
        if not math.isnan(same):
            inside = median(rounds, figure(engine, "saturation", "in the model"))
            print(
                f"{engine} at saturation: {same:.2f} of direct calls with the same rows, {rows:.1f} rows a batch, "
                f"{inside:.0%} of the time inside of the model.\n"
            )
    for count in rounds[0]["direct"]["many"]:
        print(f"- a direct call of {count} rows: {ms(median(rounds, figure('direct', 'many', count)))}")


def median(rounds: Sequence[Round], wanted: Callable[[Round], float]) -> float:
    """Returns the median of a figure over the rounds that have it; NaN if none has."""
    found = []
    for one in rounds:
        try:
            found.append(wanted(one))
        except KeyError:
            continue
    return statistics.median(found) if found else float("nan")


def figure(engine: str, part: str, name: str) -> Callable[[Round], float]:
    """Returns what takes a figure out of a round."""
    return lambda one: one[engine][part][name]


def _of_echo(engine: str) -> Callable[[Round], float]:
    longer = beside(engine)
    return lambda one: longer(one) / one["echo"]["one"]["p50"]


def _of_fastest(engine: str) -> Callable[[Round], float]:
    rate = figure(engine, "saturation", "rows_per_second")
    return lambda one: rate(one) / _fastest(one)


def beside(engine: str) -> Callable[[Round], float]:
    """How many seconds longer an answer takes than a direct call of the model."""

    def seconds(one: Round) -> float:
        model = 0.0 if engine == "echo" else next(iter(one["direct"]["one"].values()))
        return one[engine]["one"]["p50"] - model

    return seconds


def ms(seconds: float) -> str:
    """Returns seconds as milliseconds, or a dash for NaN."""
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:.1f} ms"


def _number(value: float, digits: int = 0) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _fastest(one: Round) -> float:
    """Rows a second of the best direct calls."""
    return max(int(rows) / seconds for rows, seconds in one["direct"]["many"].items())


def _batches(one: Round, engine: str) -> dict[int, float]:
    """How many batches of each number of rows exportkit ran at saturation."""
    found = one[engine]["saturation"]
    return {int(name.split()[-1]): count for name, count in found.items() if name.startswith("batches of ")}


def _mean_rows(one: Round, engine: str) -> float:
    batches = _batches(one, engine)
    return sum(rows * count for rows, count in batches.items()) / sum(batches.values())


def same_rows(one: Round, engine: str) -> float:
    """Seconds that direct calls need for the same batches, over the seconds that passed."""
    times = {int(rows): seconds for rows, seconds in one["direct"]["many"].items()}
    needed = sum(count * _between(times, rows) for rows, count in _batches(one, engine).items())
    return needed / one[engine]["saturation"]["elapsed"]


def _between(times: Mapping[int, float], rows: int) -> float:
    """Returns the time of a call, on the line between the nearest that were measured."""
    known = sorted(times)
    place = min(bisect_left(known, rows), len(known) - 1)
    if known[place] == rows or place == 0:
        return times[known[place]]
    low, high = known[place - 1], known[place]
    return times[low] + (times[high] - times[low]) * (rows - low) / (high - low)
