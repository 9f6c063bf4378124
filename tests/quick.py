"""`pytest --quick`, which `make check` runs: the tests that start no process. Compilers and interpreters take minutes.

Which these are is read from the code when the tests are collected: it is the same on every machine, whatever .cache
has. A test is left out if it has the marker `process` or needs the fixture `starts_process`, or if the names of
STARTERS stand in its code, in that of a fixture it needs, or in that of a function of tests/ which these use. What
starts processes only through the code under test is not found in this way: such a test fails, and says what it lacks.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

STARTERS = {"subprocess", "multiprocessing", "ChildProcess", "Conversation", "VerifyWorker", "export_aoti", "one_maker"}
_FORKS = {"fork", "forkpty", "posix_spawn", "system"}  # of os
# `one_maker` is an event also where it finds the file: what depends on a compiler is slow where it has not run yet.
_EVENTS = {"subprocess.Popen", "exportkit.ChildProcess", "tests.one_maker", *(f"os.{name}" for name in _FORKS)}

_running: list[str] = []  # the test, and what it started


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
        frames = [frame for frame in traceback.extract_stack() if "/tests/" in frame.filename]
        _running.append(f"{event} in {frames[-2].filename}:{frames[-2].lineno}" if len(frames) > 1 else event)


class _Quick:
    """Leaves tests out, and lets others fail that start processes."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        reader = _Reader(config.rootpath / "tests")
        left_out = [item for item in items if reader.starts(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        if call.when == "teardown" and len(_running) > 1:
            report.outcome = "failed"
            report.longrepr = (
                f"this test started a process ({_running[1]}), so the quick tests must leave it out: "
                "mark it with @pytest.mark.process, or let the fixture that starts it ask for `starts_process`"
            )
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        _running[:] = [item.nodeid]  # collecting, and xdist's workers, may start what they need
        try:
            return (yield)
        finally:
            _running.clear()


class _Reader:
    """Reads from the code of a folder what starts processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[object, bool] = {}

    def starts(self, item: pytest.Item) -> bool:
        if item.get_closest_marker("process") or "starts_process" in getattr(item, "fixturenames", ()):
            return True
        fixtures = getattr(item, "_fixtureinfo", None)  # pytest has no public way from a test to its fixtures' code
        used = [fixture.func for each in fixtures.name2fixturedefs.values() for fixture in each] if fixtures else []
        return any(map(self._names_starter, [getattr(item, "function", None), *used]))

    def _names_starter(self, thing: Any) -> bool:
        """Whether what starts processes is named in a function or class, or in those of the folder that it names."""
        thing = inspect.unwrap(getattr(thing, "__func__", thing))
        if not inspect.isfunction(thing) and not inspect.isclass(thing):
            return False
        if thing not in self._known:
            self._known[thing] = False  # for what names itself
            if inspect.isclass(thing):
                self._known[thing] = any(map(self._names_starter, vars(thing).values()))
            else:
                names = _names(thing.__code__)
                scope = {**thing.__globals__, **inspect.getclosurevars(thing).nonlocals}
                used = [scope[name] for name in names if name in scope]
                used += [vars(m)[name] for m in used if self._is_module(m) for name in names if name in vars(m)]
                self._known[thing] = (
                    bool(names & STARTERS)
                    or ("os" in names and bool(names & _FORKS))
                    or any(self._names_starter(each) for each in used if self._is_ours(each))
                )
        return self._known[thing]

    def _is_ours(self, thing: Any) -> bool:
        return self._is_module(sys.modules.get(getattr(thing, "__module__", None) or ""))

    def _is_module(self, thing: Any) -> bool:
        """Whether this is a module of the folder."""
        return inspect.ismodule(thing) and self._folder in Path(getattr(thing, "__file__", None) or "/").parents


def _names(code: CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*map(_names, inner))
