"""Memory that was freed is used again, and the log is legible."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from exportkit.serve.process_settings import IndentedFormatter
from tests.subprocesses import run_interpreter

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


def test_a_request_reuses_the_pages_of_the_one_before(tmp_path: Path):
    kept, default = (run_interpreter(REQUESTS, how, cwd=tmp_path) for how in ("kept", "default"))
    if kept == "not glibc\n":
        pytest.skip("the C library is not glibc")
    assert int(kept) < int(default) / 10


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
