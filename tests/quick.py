"""`pytest --quick`, which `make check` runs: the tests that start no process. Compilers and interpreters take minutes.

Which these are is read from the code when the tests are collected: it is the same on every machine, whatever .cache
has. A test is left out if it has the marker `process` or needs the fixture `starts_process`, or if one of the names of
_STARTERS stands in its code, in that of its fixtures, or in that of a function of tests/ which these name. What starts
processes only through the code under test is not found in this way: such a test fails, and says what it lacks.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Generator, Sequence
from types import CodeType, ModuleType
from typing import Any

import pytest

_STARTERS = {"subprocess", "multiprocessing", "ChildProcess", "ChildClient", "VerifyWorker", "one_maker"}
_FORKS = {"fork", "forkpty", "posix_spawn", "system"}  # of os
# `one_maker` is an event also where it finds the file: what depends on a compiler is slow where it has not run yet.
_EVENTS = {"subprocess.Popen", "exportkit.ChildProcess", "tests.one_maker", *(f"os.{name}" for name in _FORKS)}
_SAYS = (
    "this test started a process ({}), so the quick tests must leave it out: "
    "mark it with @pytest.mark.process, or let the fixture that starts it ask for `starts_process`"
)

_running: list[str] = []  # the test, and what it has started


@pytest.fixture(scope="session")
def starts_process() -> None:
    """Is asked for by fixtures that start processes through the code under test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests that start processes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        sys.addaudithook(_note)
        config.pluginmanager.register(_Quick())


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS and _running and arguments[:1] != ("git",):  # which answers at once, and every export asks it
        calls = [frame for frame in traceback.extract_stack() if "/tests/" in frame.filename]
        _running.append(" in ".join([event, *(f"{call.filename}:{call.lineno}" for call in calls[-2:-1])]))


class _Quick:
    """Leaves tests out, and lets others fail that start processes."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = {item for item in items if _starts_process(item)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown" and len(_running) > 1:
            report.outcome, report.longrepr = "failed", _SAYS.format(_running[1])
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        _running[:] = [item.nodeid]  # collecting, and xdist's workers, may start what they need
        try:
            return (yield)
        finally:
            _running.clear()


def _starts_process(item: pytest.Item) -> bool:
    if item.get_closest_marker("process") or "starts_process" in getattr(item, "fixturenames", ()):
        return True
    fixtures = getattr(item, "_fixtureinfo", None)  # pytest has no public way from a test to the code of its fixtures
    todo: list[Any] = (
        [fixture.func for each in fixtures.name2fixturedefs.values() for fixture in each] if fixtures else []
    )
    todo.append(getattr(item, "function", None))
    seen: set[Any] = set()
    while todo:
        code: Any = todo.pop()
        code = inspect.unwrap(getattr(code, "__func__", code))
        if (inspect.isfunction(code) or inspect.isclass(code)) and code not in seen:
            seen.add(code)
            names_starter, used = _read(code)  # type: ignore[arg-type]  # functions can be hashed
            if names_starter:
                return True
            todo += used
    return False


@functools.cache
def _read(code: Any) -> tuple[bool, Sequence[Any]]:
    """Whether a function names what starts processes; and what it names of tests/, or a class has."""
    if inspect.isclass(code):
        return False, [each for each in vars(code).values() if callable(each) or hasattr(each, "__func__")]
    names = _names(code.__code__)
    scope = {**code.__globals__, **inspect.getclosurevars(code).nonlocals}
    used = [scope[name] for name in names & scope.keys()]
    used += [vars(each)[name] for each in used if _is_ours(each) for name in names & vars(each).keys()]
    starter = bool(names & _STARTERS) or ("os" in names and bool(names & _FORKS))
    return starter, [each for each in used if _is_ours(sys.modules.get(getattr(each, "__module__", None) or ""))]


def _is_ours(thing: Any) -> bool:
    """Whether this is a module of tests/."""
    file = (getattr(thing, "__file__", None) or "") if isinstance(thing, ModuleType) else ""
    return "/tests/" in file and "/site-packages/" not in file


def _names(code: CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*map(_names, inner))
