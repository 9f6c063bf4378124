"""The short form of `benchmarks.call_soak`, whose long one runs on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import call_soak


def test_loads_refusals_and_calls_leave_nothing_behind(tiny_package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = call_soak.main([str(tiny_package), "--loads", "30", "--refused", "3000", "--calls", "1000"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["count"] for line in lines] == [1000, 3000, 30]
    assert code == 0, lines
