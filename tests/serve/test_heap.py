"""Memory that was freed is used again instead of being faulted in again."""

from __future__ import annotations

import subprocess
import sys

import pytest

REQUESTS = """
import resource, sys
if sys.argv[1] == "kept":
    from exportkit.serve.heap import keep_freed_memory
    if not keep_freed_memory():
        sys.exit("not glibc")
def request():
    kept = [bytearray(3 << 20) for _ in range(4)]
for _ in range(3):
    request()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    request()
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
