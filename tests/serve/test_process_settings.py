"""Memory that was freed is used again, garbage is collected, Python's lock is given up soon, and the log is legible."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from exportkit.serve.process_settings import IndentedFormatter

REQUESTS = """
import resource, sys, threading
if sys.argv[1] == "kept":
    from exportkit.serve.process_settings import keep_freed_memory
    if not keep_freed_memory():
        sys.exit("not glibc")
def request():
    kept = [bytearray(3 << 20) for _ in range(4)]
def work():
    for _ in range(10):
        request()
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", REQUESTS, how], capture_output=True, text=True, check=False)
    if "not glibc" in done.stderr:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_request_reuses_the_pages_of_the_one_before():
    assert faults("kept") < faults("default") / 10


CYCLES = """
import gc, sys, weakref
gc.set_threshold(100_000)
if sys.argv[1] == "often":
    from exportkit.serve.process_settings import collect_requests
    collect_requests()
class Request: pass
def request():
    one = Request()
    one.itself = one
    return weakref.ref(one)
left = [request() for _ in range(5000)]
print(sum(each() is not None for each in left))
"""


def left_behind(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CYCLES, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_what_a_request_leaves_behind_is_collected_soon():
    assert left_behind("rarely") == 5000
    assert left_behind("often") < 1000


LOCK = """
import sys, threading, time
sys.setswitchinterval(1000.0)
if sys.argv[1] == "soon":
    from exportkit.serve.process_settings import shorten_switch_interval
    shorten_switch_interval()
came_back = []
def runner():
    time.sleep(0.1)  # without the lock, as in a model
    came_back.append(True)
threading.Thread(target=runner).start()
ends = time.monotonic() + float(sys.argv[2])
while not came_back and time.monotonic() < ends:
    pass
print(bool(came_back))
"""


def comes_back(how: str, seconds: int) -> str:
    done = subprocess.run([sys.executable, "-c", LOCK, how, str(seconds)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_thread_that_works_gives_up_the_lock():
    assert comes_back("never", 1) == "False"
    assert comes_back("soon", 100) == "True"


def test_no_text_of_a_client_passes_for_another_entry_of_the_log():
    try:
        raise ValueError("why")
    except ValueError as error:
        failed = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "", 0, "GET %s failed", ('/a\n{"status": 200}\r\x1b[2J',), failed)
    first, forged, *others = IndentedFormatter("%(levelname)s: %(message)s").format(record).splitlines()
    assert (first, forged) == ("ERROR: GET /a", '  {"status": 200}\\r\\x1b[2J failed')
    assert others[-1] == "  ValueError: why"
    assert all(line.startswith("  ") for line in others)
