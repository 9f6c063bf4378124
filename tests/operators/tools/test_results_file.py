"""A long `exportkit ops check` is written down as it goes, and goes on after it was cut off."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from exportkit.cli import main
from exportkit.operators.tools.checking import _left
from tests.operators.tools.conftest import INJECTED

ONLY = ["--only", "fake-shape", "--dtype", "float32"]


def checked_by(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, list[str]]:
    """Runs the command. Returns its exit code, what it prints, and which operators it checks."""
    capfd.readouterr()
    code = main(["ops", "check", str(INJECTED), *ONLY, *map(str, arguments)])
    said = capfd.readouterr()
    return code, said.out + said.err, re.findall(r"checking injected::(\w+)", said.err)


@pytest.mark.process
def test_what_was_done_is_kept_and_the_rest_is_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    file = tmp_path / "results.jsonl"
    code, said, names = checked_by(capfd, "--operator", "un*", "--operator", "goo?", "--output", file)
    assert (code, names) == (0, ["unheard", "good"])
    assert "injected::good: ok\n" in said
    with file.open("a") as cut:
        cut.write('{"type":"Chec')

    code, said, names = checked_by(capfd, "--operator", "*ed", "--operator", "good", "--output", file, "--resume")
    assert (code, names) == (1, ["padded"])
    assert "2 operators: 1 broken" in said
    first, *results = map(json.loads, file.read_text().splitlines())
    assert first["source"] == str(INJECTED)
    assert [each["report"]["operator"] for each in results] == [f"injected::{n}" for n in ("unheard", "good", "padded")]
    assert [f["check"] for f in results[2]["report"]["findings"]] == ["fake-shape"]

    code, said, names = checked_by(capfd, "--operator", "good", "--output", file, "--resume", "--seed", 1)
    assert code == 2
    assert "has results of another run: seed was 0, and is 1" in said
    code, said, names = checked_by(capfd, "--operator", "good", "--output", file, "--seed", 1)
    assert (code, names, len(file.read_text().splitlines())) == (0, ["good"], 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume"], "the file that --output names"),
        (["--output", __file__, "--resume"], "has no results of `exportkit ops check`"),
        (["--output", "/dev/null/results.jsonl"], "cannot be written"),
    ],
)
def test_what_cannot_be_gone_on_with_is_a_usage_error(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
):
    code, printed, _ = checked_by(capfd, *arguments)
    assert code == 2
    assert said in printed


def test_the_time_that_is_left_follows_from_what_was_done():
    assert _left(0.0, 0, 277) == ""
    assert _left(120.0, 2, 12) == ", about 10 min left"
    assert _left(1.0, 1, 3) == ""
