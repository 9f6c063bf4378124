"""What the tests of `exportkit ops` share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exportkit.cli import main
from tests.fixtures import stable_library
from tests.subprocesses import compiler_in_forkservers

INJECTED = Path(__file__).with_name("faulty_operators.py")


def misbehaving() -> Path:
    """The library that the tests of verification have built, whose operator crashes and stalls as it is told."""
    return stable_library.build(Path(__file__).parents[2] / "verify" / "misbehaving.cpp")


@pytest.fixture(scope="module", autouse=True)  # for a package without __init__.py, pytest would never end it
def _children_have_torchs_compiler() -> Iterator[None]:
    with compiler_in_forkservers():
        yield


@pytest.fixture
def ops(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Runs `exportkit ops ... --json` in this process. Returns the exit code and the document."""

    def run(*arguments: object) -> tuple[int, Any]:
        capsys.readouterr()
        code = main(["ops", *map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run
