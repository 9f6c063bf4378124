"""The soak of sequences, for some seconds: benchmarks/sequence_soak.py says what it holds the server to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.subprocesses import output_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("options", [(), ("--isolate",)], ids=["together", "isolated"])
def test_no_client_gets_an_answer_from_the_state_of_another(
    ticker_package: Path, tmp_path: Path, options: tuple[str, ...]
):
    command = [sys.executable, "-m", "benchmarks.sequence_soak", str(ticker_package), *options]
    command += ["--minutes", "0.05", "--clients", "6", "--zero", "coupling", "-o", str(tmp_path / "soak.json")]
    output_of(*command, cwd=ROOT, timeout=600)
    seen = json.loads((tmp_path / "soak.json").read_text())["seen"]
    assert seen["answered"] > 0
    assert not [name for name in seen if name.startswith("WRONG")]
