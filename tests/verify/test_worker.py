from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from exportkit.verify.outcomes import Crashed, TimedOut
from exportkit.verify.worker import Worker


@pytest.fixture
def child(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "children"))
    with Worker("misbehaving_child", folder=tmp_path, cwd=tmp_path) as worker:
        yield worker


def ask(child, do, timeout=30.0, **command):
    return child.ask({"do": do, **command}, doing=f"asked to {do}", timeout=timeout)


def test_a_command_gets_its_answer_and_the_child_stays_for_the_next(child):
    assert ask(child, "echo", text="ä\n", number=1) == {"text": "ä\n", "number": 1}
    assert ask(child, "echo", text="x" * 300_000)["text"] == "x" * 300_000
    assert child.alive


def test_an_exception_is_an_answer_without_torch_s_c_stack(child):
    assert ask(child, "fail") == {"error": "ValueError", "detail": "no such thing", "exit_code": None}
    assert child.alive


def test_an_error_of_exportkit_keeps_its_exit_code(child):
    assert ask(child, "refuse") == {"error": "NoTargetError", "detail": "not here", "exit_code": 4}


def test_what_is_printed_on_stdout_does_not_disturb_the_conversation(child):
    assert ask(child, "chatter") == {"said": True}


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGILL, signal.SIGABRT, signal.SIGKILL])
def test_death_by_a_signal_is_a_verdict_that_names_it_and_what_was_printed(child, number):
    verdict = ask(child, "die", signal=number)
    assert isinstance(verdict, Crashed)
    assert verdict.signal == number
    assert signal.Signals(number).name in verdict.message
    assert "while asked to die" in verdict.message
    assert "about to die" in verdict.message
    assert not child.alive


def test_leaving_without_an_answer_is_a_crash_too(child):
    verdict = ask(child, "leave", status=7)
    assert verdict == Crashed(None, 7, "asked to leave", "")
    assert "exited with status 7" in verdict.message


def test_asking_a_dead_child_is_a_crash_and_no_exception(child):
    ask(child, "leave", status=0)
    assert isinstance(ask(child, "echo"), Crashed)


def test_a_child_that_does_not_answer_in_time_is_killed(child):
    ask(child, "echo")  # it has started
    start = time.monotonic()
    verdict = ask(child, "stall", timeout=0.3)
    assert verdict == TimedOut(0.3, "asked to stall")
    assert "--timeout" in verdict.message
    assert time.monotonic() - start < 5
    assert not child.alive


def test_the_child_s_temporary_files_are_in_its_own_folder(child, tmp_path):
    answer = ask(child, "where")
    assert answer["cwd"] == answer["tmp"] == str(tmp_path)


def test_the_caller_s_directory_cannot_be_imported_from(child):
    assert str(Path.cwd()) not in ask(child, "where")["path"][:-1]
