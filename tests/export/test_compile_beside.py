"""Compiling beside the recording of cases: when it is done, and that a fork that fails costs nothing but time."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exportkit.export import compile_beside
from exportkit.export.compile_beside import CompiledBeside
from exportkit.export.compile_plan import CompilePlan
from exportkit.export.traced import TracedMethod
from exportkit.package.manifest import Call, ConstantNode
from exportkit.progress import silent

PLAN = CompilePlan(torch.device("cpu"), ("x86-64-v3",), cache=True, beside=True)


@pytest.fixture(scope="module")
def method() -> TracedMethod:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    return TracedMethod("forward", program, Call((), (), ConstantNode(None), (), ()))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Replaces the compiler."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return lambda function: monkeypatch.setattr(compile_beside, "compile_program", function)


def run(method: TracedMethod, plan: CompilePlan = PLAN) -> float:
    """Compiles beside nothing, and returns the seconds that it took."""
    began = time.monotonic()
    with CompiledBeside(plan, tf32=False) as beside:
        beside.begin([method])
        beside.wait(silent)
    return time.monotonic() - began


def test_each_part_is_compiled_for_the_threads_of_the_parent(
    tmp_path: Path, compiles: Any, method: TracedMethod, capfd: pytest.CaptureFixture[str]
) -> None:
    def compile_part(method: TracedMethod, place: Path, plan: CompilePlan, isa: str, gpu: None, **more: Any) -> None:
        os.write(2, b"a warning")
        (tmp_path / isa).write_text(f"{method.name} {torch.get_num_threads()} {place.parent.is_dir()}")

    compiles(compile_part)
    run(method, replace(PLAN, cpu_isas=("x86-64-v3", "x86-64-v4")))
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    expected = f"forward {torch.get_num_threads()} True"
    assert told == {"x86-64-v3": expected, "x86-64-v4": expected}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("fails", [os.abort, lambda: 1 / 0])
def test_a_fork_that_fails_says_nothing(
    fails: Callable[[], object], compiles: Any, method: TracedMethod, capfd: pytest.CaptureFixture[str]
) -> None:
    compiles(lambda *args, **more: fails())
    run(method)
    assert capfd.readouterr() == ("", "")


def test_a_fork_that_does_nothing_is_not_waited_for(
    compiles: Any, method: TracedMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_beside, "PATIENCE", 0.2)
    compiles(lambda *args, **more: time.sleep(60))
    assert run(method) < 30


def test_what_ends_the_export_ends_the_fork_and_its_compilers(
    tmp_path: Path, compiles: Any, method: TracedMethod
) -> None:
    def compile_part(*args: Any, **more: Any) -> None:
        compiler = subprocess.Popen(["sleep", "60"])
        (tmp_path / "pids").write_text(f"{os.getpid()} {compiler.pid} ")
        compiler.wait()

    compiles(compile_part)
    pids = tmp_path / "pids"
    with suppress(KeyboardInterrupt), CompiledBeside(PLAN, tf32=False) as beside:
        beside.begin([method])
        while not (pids.exists() and pids.read_text().endswith(" ")):
            time.sleep(0.02)
        raise KeyboardInterrupt
    for pid in pids.read_text().split():
        while (stat := Path("/proc") / pid / "stat").exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.02)


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, beside=False),
        replace(PLAN, cache=False),
        replace(PLAN, device=torch.device("cuda")),
    ],
)
def test_there_is_no_fork_where_its_code_would_not_be_found(
    plan: CompilePlan, method: TracedMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a fork"))
    run(method, plan)


def test_a_large_model_gets_all_cores_and_the_memory(method: TracedMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a fork"))
    monkeypatch.setattr(compile_beside, "MOST_BYTES", 23)
    run(method)
