"""`verify --runner cpp`: exportkit-run replays the cases, and its verdicts are those of the report."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from exportkit.errors import UsageError
from exportkit.reference_model import ReferenceModel
from exportkit.verify import cpp_replay
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Crashed, LoadFailed, Match, Mismatch, TimedOut
from exportkit.verify.verify import verify
from tests.artifacts import artifact
from tests.runtime import exportkit_run
from tests.verify.test_injected_state import rewritten, swapped

IN_CPP = VerifyOptions(against="cases", runner="cpp")


@pytest.fixture
def _built() -> None:
    exportkit_run.require_built()


@pytest.mark.usefixtures("_built")
def test_sequences_are_replayed_in_cpp() -> None:
    checks = verify(artifact("decoder"), IN_CPP).checks
    assert {type(check.verdict) for check in checks} == {Match}
    assert {check.against for check in checks} == {"cases"}
    last = checks[-1].verdict
    assert isinstance(last, Match)
    named = {output.name: output for output in last.outputs}
    assert {"call 1: 0", "call 1: written.heard", "state values_1", "state position"} <= named.keys()
    assert named["state position"].dtype == "int64"


@pytest.mark.usefixtures("_built")
def test_swapped_layers_are_seen_in_cpp(tmp_path: Path) -> None:
    report = verify(rewritten(artifact("decoder"), tmp_path / "swapped.pt2", swapped), IN_CPP)
    assert report.failure is not None
    verdict = report.failure.verdict
    assert isinstance(verdict, Mismatch)
    assert verdict.message.startswith("call 1: 0: less accurate than eager")
    assert report.exit_code == 1


def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any) -> None:
    """Stands in for exportkit-run."""
    monkeypatch.setattr(cpp_replay, "PROGRAM", tmp_path / "exportkit-run")
    (tmp_path / "exportkit-run").touch()

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, *answer)

    monkeypatch.setattr("exportkit.verify.cpp_replay.subprocess.run", run)


REFUSED = '{"error":{"kind":"DigestMismatchError","message":"record x","hint":"Get it again.","exit_code":3}}'


@pytest.mark.parametrize(
    ("answer", "verdict", "code"),
    [
        ((-11, "", "last words"), Crashed(11, None, cpp_replay._DOING, "last words"), 13),
        (subprocess.TimeoutExpired("exportkit-run", 600.0), TimedOut(600.0, cpp_replay._DOING), 14),
        ((3, REFUSED, ""), LoadFailed("DigestMismatchError", "record x\n  Get it again.", 3), 3),
        ((127, "", "no libtorch.so"), LoadFailed("exportkit-run", "no libtorch.so", 127), 127),
    ],
)
def test_how_it_ends_is_a_verdict(
    answer: Any, verdict: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, tmp_path, answer)
    report = verify(artifact("decoder"), IN_CPP)
    assert [check.verdict for check in report.checks] == [verdict]
    assert report.exit_code == code


def test_without_the_program_the_machine_cannot_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_replay, "PROGRAM", tmp_path / "exportkit-run")
    report = verify(artifact("decoder"), IN_CPP)
    assert report.exit_code == 4
    assert "make build" in report.checks[0].verdict.message


def test_what_it_does_not_do_is_refused() -> None:
    model = ReferenceModel(model="net.py:Net")
    for options in (
        VerifyOptions(against="eager", runner="cpp", eager=model),
        VerifyOptions(rtol=0.1, atol=0.1, runner="cpp"),
    ):
        with pytest.raises(UsageError, match="replays the recorded cases, with"):
            verify(artifact("decoder"), options)


def test_a_program_is_not_for_cpp() -> None:
    with pytest.raises(UsageError, match="no compiled target"):
        verify(artifact("decoder-program"), IN_CPP)
