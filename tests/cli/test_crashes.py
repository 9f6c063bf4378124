"""A crash of the process that exports is named: what died, at which step, at which line or operator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.artifacts import ROOT

_EXPORT = "-m exportkit export tests/cli/crash_models.py:spec --json --model-kwargs"


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Starts an interpreter, as a user does: it has imported nothing."""
    command = [sys.executable, *arguments]
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, env=kept | variables, **pipes)


@pytest.mark.slow_but("checking*")
@pytest.mark.parametrize(
    ("when", "name", "step", "place"),
    [
        ("checking", "SIGSEGV", "checking the model", "16 in forward"),
        ("compiling", "SIGABRT", "compiling for cpu", "40 in <lambda>"),
    ],
)
def test_a_crash_names_the_signal_the_step_and_the_line(
    when: str, name: str, step: str, place: str, tmp_path: Path
) -> None:
    process = start(*_EXPORT.split(), json.dumps({"when": when}), "-o", str(tmp_path / "model.pt2"))
    stdout, stderr = process.communicate()
    error = json.loads(stdout)["error"]
    assert error["kind"] == "ExportError"
    assert process.returncode == error["exit_code"] > 0
    assert f"was killed by {name}" in error["message"]
    assert f" while {step}" in error["message"]
    assert f", at crash_models.py:{place}: `" in error["message"]
    assert error["message"] in stderr
    assert "Fatal Python error" not in stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_crash_of_edge_values_says_how_to_export_without_them(tmp_path: Path) -> None:
    command = [*_EXPORT.split(), json.dumps({"when": "edge_case"}), "-o", str(tmp_path / "model.pt2")]
    stdout, _ = start(*command).communicate()
    assert "export with --no-edge-cases" in json.loads(stdout)["error"]["hint"]
    process = start(*command, "--no-edge-cases", "--format", "program")
    process.communicate()
    assert process.returncode == 0


def test_a_crash_in_others_code_names_the_operator_of_the_graph() -> None:
    script = (
        "import os; from exportkit.child.supervised import run_supervised; from exportkit.progress import note\n"
        "def work():\n note('compiling for cpu'); note('', 'aten.sin.default of model.py:3'); os.kill(os.getpid(), 9)\n"
        "print(run_supervised(work))"
    )
    stdout, _ = start("-c", script).communicate()
    assert stdout == "Crash(status=-9, step='compiling for cpu', node='aten.sin.default of model.py:3', line='')\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_the_command_ends_the_process_that_exports(number: signal.Signals) -> None:
    script = (
        "import os, time; from exportkit.child.supervised import run_supervised\n"
        "run_supervised(lambda: (print(os.getpid(), flush=True), time.sleep(600)))"
    )
    process = start("-c", script)
    assert process.stdout is not None
    fork = Path("/proc") / process.stdout.readline().strip() / "stat"
    process.send_signal(number)
    assert process.wait() == -number
    while fork.exists() and fork.read_text().split()[2] != "Z":
        time.sleep(0.05)


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_of_the_process_that_exports_sleep_while_they_wait(given: dict[str, str], policy: str) -> None:
    script = (
        "import os; from exportkit.child.supervised import run_supervised\n"
        "def work():\n print(os.environ['OMP_WAIT_POLICY']); return 0\n"
        "run_supervised(work)"
    )
    stdout, _ = start("-c", script, **given).communicate()
    assert stdout == f"{policy}\n"
