from __future__ import annotations

import os
import threading

from exportkit.serve.operations.observation import LineWriter


def test_every_line_is_written_in_order_before_it_is_closed():
    read, write = os.pipe()
    lost: list[int] = []
    received: list[bytes] = []

    def drain() -> None:
        with open(read, "rb") as file:
            received.extend(file.read().splitlines())

    reader = threading.Thread(target=drain)
    reader.start()
    writer = LineWriter(write, lost.append)
    lines = [f"{index} ü" for index in range(3000)]
    for line in lines:
        writer.write(line.encode())
    writer.close(60)
    os.close(write)
    reader.join()
    assert [line.decode() for line in received] == lines
    assert lost == []


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


def test_a_reader_that_went_away_is_counted():
    read, write = os.pipe()
    os.close(read)
    lost: list[int] = []
    writer = LineWriter(write, lost.append)
    writer.write(b"a")
    writer.close(60)
    os.close(write)
    assert lost == [1]
