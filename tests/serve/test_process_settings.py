"""Memory that was freed is used again, garbage is collected, Python's lock is given up soon, and the log is legible."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from exportkit.serve.process_settings import IndentedFormatter


def printed(code: str, *arguments: str) -> str:
    """What a program prints in an interpreter of its own."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


REQUESTS = """
import resource, sys, threading
if sys.argv[1] == "kept":
    from exportkit.serve.process_settings import keep_freed_memory
    if not keep_freed_memory():
        print("not glibc")
        sys.exit()
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
    found = printed(REQUESTS, how)
    if found == "not glibc":
        pytest.skip("the C library is not glibc")
    return int(found)


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


def test_what_a_request_leaves_behind_is_collected_soon():
    assert int(printed(CYCLES, "rarely")) == 5000
    assert int(printed(CYCLES, "often")) < 1000


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


def test_a_thread_that_works_gives_up_the_lock():
    assert printed(LOCK, "never", "1") == "False"
    assert printed(LOCK, "soon", "100") == "True"


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
