"""Commands of exportkit, run in this process."""

from __future__ import annotations

import pytest

from exportkit.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Runs `exportkit` with these arguments. Returns its exit code, and what it printed on stdout and on stderr."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
