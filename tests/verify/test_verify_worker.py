"""Commands and answers of a child process; test_verify.py has one that dies, stalls and raises."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exportkit.child.messages import Message
from exportkit.verify.outcomes import Crashed
from exportkit.verify.verify_worker import VerifyWorker
from tests.verify import misbehaving_child


@pytest.fixture
def child():
    with VerifyWorker("tests.verify.misbehaving_child", search_path="installed") as worker:
        yield worker


def ask(child, do, answer="Echo", timeout=600.0, **command):
    asked = getattr(misbehaving_child, do)(**command)
    return child.ask(asked, getattr(misbehaving_child, answer), doing=f"asked to {do}", timeout=timeout)


@pytest.mark.parametrize(
    "text", ["ä\n", "x" * 300_000, os.fsdecode(b"no UTF-8 \xff")], ids=["other letters", "long", "no UTF-8"]
)
def test_a_command_gets_its_answer_and_the_child_stays_for_the_next(child, text):
    assert ask(child, "Echo", text=text, number=1).text == text
    assert ask(child, "Echo", text="again").number == 0
    assert child.alive


class Unknown(Message, frozen=True):
    """What no child has a handler for."""


class Echo(Message, frozen=True):
    """What the child's has and more."""

    text: str = ""
    loudly: bool = True


@pytest.mark.parametrize(("command", "says"), [(Unknown(), "Unknown"), (Echo(), "loudly")])
def test_a_command_that_is_none_of_the_child_s_ends_it_and_is_named(child, command, says):
    verdict = child.ask(command, Echo, doing="asked for nothing", timeout=600.0)
    assert isinstance(verdict, Crashed)
    assert "ValidationError" in verdict.output
    assert says in verdict.output


def test_what_is_printed_on_stdout_does_not_disturb_the_conversation(child):
    assert ask(child, "Chatter").text == "said"


def test_leaving_without_an_answer_is_a_crash_too(child):
    verdict = ask(child, "Leave", status=7)
    assert verdict == Crashed(None, 7, "asked to Leave", "")
    assert "exited with status 7" in verdict.message


def test_the_child_s_temporary_files_are_in_a_folder_that_goes_with_it(child):
    answer = ask(child, "Where", "Here")
    assert answer.cwd == answer.tmp
    assert Path(answer.tmp).is_dir()
    child.close()
    assert not Path(answer.tmp).exists()


def test_the_caller_s_directory_cannot_be_imported_from(child):
    assert str(Path.cwd()) not in ask(child, "Where", "Here").path[:-1]
