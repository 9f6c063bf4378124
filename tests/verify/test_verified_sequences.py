"""Packages with state are verified in sequences of calls, in a fresh process and against eager."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exportkit.child.messages import Failed
from exportkit.cli import main
from exportkit.errors import UsageError
from exportkit.reference_model import ReferenceModel
from exportkit.verify.bisecting import bisect_artifact
from exportkit.verify.commands import CallModel
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import CallFailed, Crashed, Match, Mismatch
from exportkit.verify.verify import verify
from tests.artifacts import artifact
from tests.verify.test_injected_state import rewritten, swapped
from tests.verify.told_worker import HereWorker, replayed_here

MODEL = f"{Path(__file__).parent / 'state_models.py'}:decoder"
BOTH = VerifyOptions(shapes=3, eager=ReferenceModel(model=MODEL))


def test_a_fresh_process_replays_sequences_and_compares_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(artifact("decoder")), "--against", "cases", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    labels = [check["label"] for check in checks if check["against"] == "cases"]
    assert any("prefill, 4 times decode; batch=2, n=5" in label for label in labels)
    promises = [check["label"] for check in checks if check["against"] == "sessions"]
    assert promises == ["a second session", "two sessions in turns", "fork", "reset", "save and load_state"]
    assert {check["verdict"]["message"].partition(", ")[2] for check in checks if check["against"] == "sessions"} == {
        "equal bits"
    }


def test_eager_is_compared_in_sequences_and_each_other_method_in_calls() -> None:
    report = verify(artifact("decoder-program"), BOTH)
    assert report.exit_code == 0
    eager = {check.label: check.verdict for check in report.checks if check.against == "eager"}
    assert list(eager) == [
        "a session: batch=1, n=1",
        "a session: batch=4, n=1",
        "a session: batch=1, n=6",
        "similar: count=1",
        "similar: count=8",
        *[label for label in eager if label.startswith("similar")][2:],
    ]
    session = eager["a session: batch=4, n=1"]
    assert isinstance(session, Match)
    names = [output.name for output in session.outputs]
    assert names[:3] == ["call 0: 0", "call 1: 0", "call 1: written.heard"]
    assert [name for name in names if name.startswith("state")] == [
        f"state {each}" for each in ("keys_0", "values_0", "keys_1", "values_1", "bias", "position")
    ]
    assert all(output.error is not None for output in session.outputs if output.dtype == "float32")


def test_a_wrong_package_differs_from_eager_in_sequences_only(tmp_path: Path) -> None:
    path = rewritten(artifact("decoder-program"), tmp_path / "swapped.pt2", swapped)
    report = verify(path, replace(BOTH, against="eager"))
    kinds = {check.label: type(check.verdict) for check in report.checks}
    assert all(kind is (Mismatch if label.startswith("a session") else Match) for label, kind in kinds.items())


@pytest.mark.slow
def test_a_call_with_state_is_repeated_from_the_state_before_it(tmp_path: Path) -> None:
    """The manifest exchanges two tensors of the state. The graph itself is right: it agrees, with its state."""
    path = rewritten(artifact("decoder-program"), tmp_path / "swapped.pt2", swapped)
    options = replace(BOTH, against="cases")
    located = bisect_artifact(path, verify(path, options), options)
    assert located.point is None
    assert "the whole graph, traced and compiled again, agrees with eager for case" in located.message
    alone = VerifyOptions(against="cases")
    with pytest.raises(UsageError, match="there is no graph to cut: a model is imported only if"):
        bisect_artifact(path, verify(path, alone), alone)


def test_a_call_that_fails_or_crashes_says_which_one_of_the_sequence() -> None:
    answers: list[Failed | None] = [Failed("RuntimeError", "no memory")]

    class Failing(HereWorker):
        def ask(self, command: Any, answer: Any, *, doing: Any, timeout: Any) -> Any:
            if isinstance(command, CallModel) and command.number == 2:
                if isinstance(answers[0], Failed):
                    return answers[0]
                self.alive = False
                return Crashed(11, None, doing, "")
            return super().ask(command, answer, doing=doing, timeout=timeout)

    with replayed_here(Failing):
        failed = verify(artifact("decoder-program"), VerifyOptions(against="cases")).failure
        answers[0] = None
        crashed = verify(artifact("decoder-program"), VerifyOptions(against="cases")).failure
    assert failed is not None
    assert failed.verdict == CallFailed("RuntimeError", "no memory", "call 2 (decode)")
    assert crashed is not None
    assert isinstance(crashed.verdict, Crashed)
    assert crashed.verdict.doing.endswith("of program, call 2 (decode)")
