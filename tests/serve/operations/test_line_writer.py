from __future__ import annotations

import os
from pathlib import Path

from exportkit.serve.operations.observation import LineWriter


def test_what_waits_is_written_in_its_order_before_the_end(tmp_path: Path):
    lines = [b"%d" % index for index in range(3000)]
    with (tmp_path / "log").open("wb") as file:
        writer = LineWriter(file.fileno(), lambda count: None)
        for line in lines:
            writer.write(line)
        writer.close(60)
    assert (tmp_path / "log").read_bytes().splitlines() == lines


def test_nobody_waits_for_a_reader_that_does_not_read():
    read, write = os.pipe()
    lost: list[int] = []
    writer = LineWriter(write, lost.append)
    for _ in range(12_000):
        writer.write(b"x" * 100)
    assert sum(lost) > 0
    writer.close(0.01)  # the reader is still there, and does not read
    os.close(read)  # the write that waits fails, and those after it
    writer.close(60)
    os.close(write)
    assert sum(lost) == 12_000
