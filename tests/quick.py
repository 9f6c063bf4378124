"""`pytest --quick`, which `make check` runs: the tests that start no process. Compilers and interpreters take minutes.

No list says which tests these are: one that starts a process is skipped when it does. What earlier runs have compiled
into .cache lets more of them run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from exportkit.child import process

PROCESS_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
REASON = "starts a process; without --quick it runs"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="skip the tests that start a process")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        sys.addaudithook(lambda event, arguments: _skip() if event in PROCESS_STARTS else None)
        # ChildProcess starts its process in a thread of its own, but asks for the interpreter in the caller's.
        process.interpreter = _interpreter


def _skip() -> None:
    # In another thread the exception would end that thread only, and the test would wait for it.
    if threading.current_thread() is threading.main_thread() and _testing:
        pytest.skip(REASON)


def _interpreter(find: Callable[[], str] = process.interpreter) -> str:
    _skip()
    return find()


_testing: list[pytest.Item] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    _testing.append(item)  # collecting, and xdist's workers, may start what they need
    try:
        return (yield)
    finally:
        _testing.clear()
