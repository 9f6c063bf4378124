"""Children are forked from a forkserver, and nobody can tell but by how fast they start."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exportkit.child.child_client import ChildClient, ChildEndedError
from exportkit.child.process import Forkservers, use_forkservers
from tests.child.facts_worker import Ask, Facts
from tests.runtime.isolation import eventually, runs


@pytest.fixture(autouse=True)
def _own_forkservers() -> Iterator[None]:
    """Forkservers of other tests stay as they are, and ours end."""
    ours = Forkservers()
    others = use_forkservers(ours)
    yield
    use_forkservers(others)
    ours.retire()


def started(*, with_torch: bool = False) -> ChildClient:
    return ChildClient("tests.child.facts_worker", search_path="caller", with_torch=with_torch)


def asked(child: ChildClient) -> Facts:
    answer = child.ask(Ask(), Facts)
    assert isinstance(answer, Facts)
    return answer


def facts(*, with_torch: bool = False) -> Facts:
    with started(with_torch=with_torch) as child:
        return asked(child)


def test_a_child_has_torch_and_no_other_module_of_the_caller() -> None:
    assert "pytest" in sys.modules
    modules = set(facts(with_torch=True).modules)
    assert "torch" in modules
    assert not {"pytest", "hypothesis", "exportkit.child.process", "tests.child.test_forkserver"} & modules
    assert not [name for name in facts().modules if name.partition(".")[0] == "torch"]


def test_children_of_one_process_have_one_forkserver_and_see_it_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = facts()
    monkeypatch.setenv("EXPORTKIT_SOMETHING", "new")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "policies"))
    monkeypatch.delenv("PWD", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    second = facts()
    assert second.parent == first.parent
    assert "EXPORTKIT_SOMETHING" not in first.environment
    assert second.environment["EXPORTKIT_SOMETHING"] == "new"
    assert second.folder == str(tmp_path)
    assert str(tmp_path) in second.path
    assert set(second.environment) <= {*os.environ, "TMPDIR", "OMP_WAIT_POLICY", "LC_CTYPE"}


def test_a_child_holds_no_file_of_another(tmp_path: Path) -> None:
    with started() as first, started() as second:
        held = [[f for f in asked(child).files if not f.startswith("/proc/")] for child in (first, second)]
    for files in held:
        assert sum(f.startswith("socket:") for f in files) == 1
        assert not [f for f in files if f.startswith("pipe:")]


@pytest.mark.parametrize("change", ["environment", "limits"])
def test_what_torch_reads_while_it_is_imported_makes_another_forkserver(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    with started() as first:
        earlier = asked(first)
        if change == "environment":
            monkeypatch.setenv("OMP_NUM_THREADS", "3")
        else:
            resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else min(1, hard), hard))
        try:
            assert facts().parent != earlier.parent
        finally:
            resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
        assert asked(first) == earlier  # it goes on
        assert runs(earlier.parent)
    assert eventually(lambda: not runs(earlier.parent))  # with its last child


def test_where_the_forkserver_is_killed_its_children_end_and_the_next_one_starts() -> None:
    with started() as child:
        forkserver = asked(child).parent
        os.kill(forkserver, signal.SIGKILL)
        assert eventually(lambda: not child.alive)
        with pytest.raises(ChildEndedError) as error:
            child.ask(Ask(), Facts)
    assert error.value.status == -signal.SIGKILL
    assert facts().parent != forkserver


def test_a_fork_of_the_process_has_forkservers_of_its_own() -> None:
    before = facts().parent
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, str(facts().parent).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as file:
        assert int(file.read()) != before
    assert facts().parent == before
