from __future__ import annotations

import msgspec
import pytest

from exportkit.bench import tables
from exportkit.bench.results import Measurement
from tests.bench.test_results import results, row, timing


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_a_table_reads_as_markdown_and_as_text():
    text = tables.table([row("op", 1.0, eager=4.2, compile=2.0), row("another_op", 0.01234, eager=0.01)])
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1, "columns are not aligned"
    head, _, first, second = cells(text)
    assert head == [
        *("what", "size", "exportkit ms", "eager ms", "torch.compile ms"),
        *("limit ms", "of limit", "vs best", "memory", "eager memory"),
    ]
    assert first == ["op", "2x3", "1.00 ±10%", "4.20", "2.00", "0.500", "50%", "2.00x (compile)", "0.0 MB", ""]
    assert second[2:5] == ["0.0123 ±10%", "0.0100", "-"]
    assert second[7] == "0.81x (eager)"


def test_a_time_with_launches_beside_one_without_is_marked():
    ours = Measurement("exportkit", "ours", call=timing(10.0), kernels=timing(1.0))
    rows = [msgspec.structs.replace(row(), measurements=(ours, Measurement("eager", "", call=timing(20.0))))]
    head, _, line = cells(tables.table(rows))
    assert line[2:5] == ["1.00 ±10%", "10.0", "20.0 (call)"]
    assert head[3] == "its call ms"


def test_errors_stand_beside_the_times_in_a_full_table():
    found = [Measurement("exportkit", "", call=timing(1.0), error=0.00123), Measurement("eager", "", call=timing(2.0))]
    rows = [msgspec.structs.replace(row(), measurements=tuple(found))]
    assert cells(tables.table(rows))[2][2:4] == ["1.00 ±10% (1.2e-03)", "2.00"]
    assert cells(tables.table(rows, full=False))[2][2:4] == ["1.00", "2.00"]
    assert any("rms error" in note for note in tables.notes(rows))
    assert tables.notes([row(eager=1.0)]) == []


def test_rows_without_a_limit_have_no_column_for_it():
    rows = [msgspec.structs.replace(row(eager=4.0), limit=None, moved_bytes=None)]
    assert "limit" not in tables.table(rows)


def test_goals_stand_beside_what_was_reached():
    found = row(eager=4.0)
    head, _, line = cells(tables.table([found], full=False, goals={found.key: 0.9}))
    assert (line[head.index("exportkit ms")], line[head.index("goal ms")]) == ("1.00", "0.900")


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1234"), (12.34, "12.3"), (0.25249, "0.252"), (0.01288, "0.0129"), (0.00391, "0.00391")],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert tables.number(value) == text


def test_what_is_missing_is_said_once():
    failed = Measurement("library", "kornia", note="kornia is not installed")
    rows = [msgspec.structs.replace(row(name), measurements=(*row().measurements, failed)) for name in ("a", "b", "a")]
    assert tables.notes(rows) == ["library: kornia is not installed (a, b)"]


def test_the_heading_names_machine_versions_and_limit():
    text = tables.heading(results())
    for part in ("a GPU", "driver 1.2", "CUDA 13.0", "torch 2.11.0", "abc", "4000 GB/s"):
        assert part in text
