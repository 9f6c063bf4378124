"""What ends a child process is a verdict; test_verify.py has one that dies, stalls and raises."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exportkit.child.messages import Message, decode, encode
from exportkit.verify.outcomes import Crashed
from exportkit.verify.verify_worker import VerifyWorker
from tests.child.facts_worker import Ask, Facts


@pytest.fixture
def child(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with VerifyWorker("tests.child.facts_worker", search_path="installed") as worker:
        yield worker


class Unknown(Message, frozen=True):
    """What no child has a handler for."""

    text: str = os.fsdecode(b"no UTF-8 \xff")


def test_a_name_of_a_file_that_is_no_text_arrives():
    assert decode(encode(Unknown()), Unknown) == Unknown()


def test_a_command_that_is_none_of_the_child_s_ends_it_and_is_named(child):
    verdict = child.ask(Unknown(), Facts, doing="asked for nothing", timeout=600.0)
    assert isinstance(verdict, Crashed)
    assert "exited with status 1" in verdict.message
    assert "ValidationError" in verdict.output
    assert "Unknown" in verdict.output
    assert child.ask(Ask(), Facts, doing="asked again", timeout=600.0) == verdict


def test_a_child_has_a_folder_of_its_own_and_imports_nothing_from_the_caller_s(child, tmp_path):
    facts = child.ask(Ask(), Facts, doing="asked", timeout=600.0)
    assert str(tmp_path) not in facts.path
    assert facts.folder == facts.environment["TMPDIR"]
    assert Path(facts.folder).is_dir()
    child.close()
    assert not Path(facts.folder).exists()
