"""The steps of `benchmarks.shared_gpu_weights`, over memory of the host; its figures come from a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.subprocesses import ROOT, run_python

pytestmark = pytest.mark.slow

SMALL = ["--device", "cpu", "--layers", "2", "--width", "64", "--batch", "4", "--calls", "3"]
RUN = "import sys; from benchmarks import shared_gpu_weights; sys.exit(shared_gpu_weights.main(sys.argv[1:]))"


@pytest.mark.process
def test_processes_share_weights_through_all_steps(tmp_path: Path) -> None:
    written = tmp_path / "found.json"
    printed = run_python(RUN, *SMALL, "-o", written, cwd=ROOT, compiler=True)
    found = json.loads(printed)
    assert found == json.loads(written.read_text())
    loads = [*found["separate"], *found["shared"][1:], *found["let_go"]["loads"]]
    assert len(loads) == 11
    assert all(each["same"] for each in loads)
    assert found["made"]["weights_bytes"] == 2 * 64 * 64 * 2
    first = found["first_load"]["answer"]
    seen = found["written"]["others_same"]
    assert len(seen) == 3
    assert first not in seen  # what a reader writes, all have
    assert found["written"]["same_when_restored"] is True
    assert "IndexError" in found["broken"]["reader"]["error"]
    assert found["broken"]["others_same"] is True
    killed = found["killed"]
    assert killed["reader_killed"]["others_same"] is True
    assert killed["owner_killed"]["reader"]["calls"] > 0
    assert killed["owner_killed"]["reader"]["different"] == 0
    assert found["let_go"]["owner_lets_go"]["readers_same"] is True
