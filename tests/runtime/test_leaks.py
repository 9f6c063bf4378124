"""Loading, calling and closing again and again takes no more memory, files, mappings or room on disk."""

from __future__ import annotations

import json

import pytest

from benchmarks import call_soak
from exportkit.runtime.native import library_path
from tests.subprocesses import run_python

# What a process has now: resident kB, open files, mapped files, temporary files.
MEASURE = """
import json, os, sys, tempfile
import safetensors.torch, torch, exportkit
from exportkit.runtime.cache import cache_directory
def measure(process="self"):
    resident = int(open(f"/proc/{process}/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024
    mapped = sum("/" in line for line in open(f"/proc/{process}/maps"))
    cached = sum(len(files) for _, _, files in os.walk(cache_directory()))
    return [resident, len(os.listdir(f"/proc/{process}/fd")), mapped, len(os.listdir(tempfile.gettempdir())), cached]
measured = []
exportkit.load(sys.argv[1]).close()
while not list(cache_directory().glob("packages/*.json")):  # the package must be two seconds old
    exportkit.load(sys.argv[1]).close()
"""
CYCLES = """
from exportkit.errors import NotAnArchiveError
case = exportkit.load(sys.argv[1]).cases[0]
with open(sys.argv[1], "rb") as good, open("cut.pt2", "wb") as bad:
    bad.write(good.read()[:-1])
for cycle in range(201):
    try:
        exportkit.load("cut.pt2")
    except NotAnArchiveError:
        pass
    with exportkit.load(sys.argv[1], runners=2) as model:
        model(*case.args, **case.kwargs)
    if cycle in (20, 200):
        measured.append(measure())
print(json.dumps(measured))
"""
CALLS = """
isolate = sys.argv[2] == "in a worker"
model = exportkit.load(sys.argv[1], runners=2, isolate=isolate)
case = model.cases[0]
for call in range(10_001):
    model(*case.args, **case.kwargs)
    if call in (1000, 10_000):
        here, worker = measure(), measure(model.pid) if isolate else []
        measured.append(here + worker)
print(json.dumps(measured))
"""

SESSIONS = """
model = exportkit.load(sys.argv[1])
for number in range(2001):
    with model.session(batch=8) as session:
        session.push(torch.zeros(8, 4))
        session.fork().push(torch.zeros(8, 4))
        session.reset()
    if number in (200, 2000):
        measured.append(measure())
print(json.dumps(measured))
"""

# By the C interface. The last request is refused: it names no session.
REQUESTS = """
import gc
from tests.runtime.c_interface import Library
from tests.runtime.c_requests import Ask, codes, run_requests
from tests.serve.engine import ticker
model, inputs = Library(sys.argv[2]).open(sys.argv[1]), [tensor.numpy() for tensor in ticker.inputs(0).values()]
gc.freeze()
for number in range(3001):
    sessions = [model.session(batch=1) for _ in range(2)]
    asks = [*(Ask(inputs, [[number % 5]], session.handle) for session in sessions), Ask(inputs)]
    assert codes(run_requests(model, asks, number % 2 * 16)) == [0, 0, 200]
    for session in sessions:
        session.close()
    if number % 100 == 0:
        gc.collect()  # what ctypes' functions refer to
    if number in (300, 3000):
        measured.append(measure())
print(json.dumps(measured))
"""

NOISE_KB = 1024  # of the allocators; a library that stayed mapped with each load would be 180 times its 400 kB


def check_growth(code: str, package: object, folder, *arguments: object) -> None:
    (folder / "temporary").mkdir()
    said = run_python(MEASURE + code, package, *arguments, cwd=folder, TMPDIR=str(folder / "temporary"))
    early, late = json.loads(said)
    grown = [after - before for before, after in zip(early, late, strict=True)]
    for start in range(0, len(grown), 5):  # this process, and a worker
        resident, *others = grown[start : start + 5]
        assert others == [0, 0, 0, 0]
        assert resident < NOISE_KB


def test_two_hundred_loads_leave_nothing_behind(tiny_package, tmp_path):
    check_growth(CYCLES, tiny_package, tmp_path)


@pytest.mark.parametrize("where", ["here", pytest.param("in a worker", marks=pytest.mark.slow)])
def test_ten_thousand_calls_leave_nothing_behind(tiny_package, tmp_path, where):
    check_growth(CALLS, tiny_package, tmp_path, where)


def test_two_thousand_sessions_leave_nothing_behind(recorder_package, tmp_path):
    check_growth(SESSIONS, recorder_package, tmp_path)


@pytest.mark.slow
def test_three_thousand_requests_leave_nothing_behind(c_library, ticker_package, tmp_path):
    check_growth(REQUESTS, ticker_package, tmp_path, library_path())


def test_loads_refusals_and_calls_leave_nothing_behind(tiny_package, capsys):
    """The short form of the benchmark, whose long one runs on a GPU."""
    code = call_soak.main([str(tiny_package), "--loads", "30", "--refused", "3000", "--calls", "1000"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["count"] for line in lines] == [1000, 3000, 30]
    assert code == 0, lines
