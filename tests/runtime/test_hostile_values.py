"""Packages live through values that no model expects, and answer the next call as before."""

from __future__ import annotations

import pytest

from tests.artifacts import ROOT, artifact
from tests.subprocesses import run_python

ATTACK = """
import sys
from pathlib import Path
from tools.hostile_values import attack
print(attack(Path(sys.argv[1]), device="cpu", graphs=False))
"""


@pytest.mark.process
@pytest.mark.parametrize("name", ["lookups", "words", "weighted", "rotated", "recurrent", "patches", "arr-coc"])
def test_no_value_ends_a_process(name):
    said = run_python(ATTACK, artifact(name), cwd=ROOT, PYTHONPATH=str(ROOT))
    answered, refused = (int(word) for word in said.split() if word.isdigit())
    assert answered + refused > 0
    assert refused > 0 or name not in ("lookups", "words")
