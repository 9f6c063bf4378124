from __future__ import annotations

from exportkit.bench.results import OURS_GRAPHS, Machine, Measurement, Results, Row, Timing

MACHINE = Machine("a GPU", "a CPU", 2, 2, 0.1, "a GPU", "1.2", "13.0", "2.11.0", "3.11", "Linux")


def timing(median: float) -> Timing:
    return Timing(median, median * 0.9, median * 1.1, 5)


def row(subject: str = "op", ours: float = 1.0, **others: float) -> Row:
    measurements = [Measurement("exportkit", "ours", call=timing(ours), peak_bytes=4000)]
    measurements += [Measurement(name, name, call=timing(value)) for name, value in others.items()]
    return Row(subject, "2x3", "float32", "forward", 1000, 0.5, tuple(measurements))


def results(*rows: Row, created: str = "2026-01-01T00:00:00Z") -> Results:
    return Results(1, "0.1.0", "abc", created, f"exportkit bench at {created}", MACHINE, 4000.0, rows)


def test_the_best_alternative_is_the_fastest_and_its_ratio_is_to_ours():
    assert row(ours=2.0, eager=8.0, compile=3.0).best == ("compile", 1.5)
    assert row(ours=2.0, eager=1.0).best == ("eager", 0.5)
    assert row(ours=2.0, **{"eager": 4.0, "eager with operators": 3.0}).best == ("eager", 2.0)
    assert row(ours=2.0, **{"eager": 4.0, OURS_GRAPHS: 0.1}).best == ("eager", 40.0)
    assert row(ours=2.0, **{"eager": 4.0, OURS_GRAPHS: 8.0}).best == ("eager", 2.0)
    assert row().best is None


def test_kernels_are_compared_with_kernels_and_calls_with_calls():
    ours = Measurement("exportkit", "ours", call=timing(10.0), kernels=timing(1.0))
    captured = Measurement("eager", "", call=timing(20.0), kernels=timing(4.0))
    not_captured = Measurement("library", "", call=timing(20.0), note="no CUDA graph")
    found = Row("op", "1", "float32", "forward", 1000, 0.5, (ours, captured, not_captured))
    assert found.time("exportkit") == timing(1.0)
    assert (found.ratio("eager"), found.ratio("library")) == (4.0, 2.0)
    assert found.of_limit == 0.5


def test_what_failed_is_no_alternative():
    found = row(eager=2.0)
    failed = Measurement("library", "kornia", note="kornia is not installed")
    found = Row(*(getattr(found, f) for f in found.__struct_fields__[:-1]), (*found.measurements, failed))
    assert found.best == ("eager", 2.0)
