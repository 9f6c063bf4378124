"""`exportkit ops check --candidate`: what a program may write to please a check is found, and a statement says so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from exportkit.cli import main

FOLDER = Path(__file__).parent
KERNELS = FOLDER / "candidates.py"
REFERENCE = f"{FOLDER / 'doubled.py'}:doubled"


def judge(tmp_path: Path, *names: str, reference: str = REFERENCE, seed: int | None = None) -> tuple[int, Any]:
    """Returns the exit code, and the statement if there is one."""
    out = tmp_path / "statement.json"
    references = [f"--reference={name}={reference}" for name in names]
    given = [] if seed is None else ["--seed", str(seed)]
    code = main(["ops", "check", str(KERNELS), "--only", "runs", *references, *given, "--candidate", str(out)])
    return code, json.loads(out.read_text()) if out.exists() else None


def test_kernels_that_please_a_check_are_found_and_stated(tmp_path: Path) -> None:
    code, statement = judge(tmp_path, "candidates::own", "borr*", "patched", "refusing")
    assert code == 1
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    digest = hashlib.sha256(KERNELS.read_bytes()).hexdigest()
    assert statement["subject"] == [{"name": "candidates.py", "digest": {"sha256": digest}}]
    predicate = statement["predicate"]
    assert not predicate["ok"]
    assert predicate["seed_drawn_after_build"]
    found = {each["operator"].partition("::")[2]: each for each in predicate["operators"]}
    checks = {name: [finding["check"] for finding in each["findings"]] for name, each in found.items()}
    assert checks == {
        "own": [],
        "borrowed": ["judged-calls"],
        "patched": ["judged-values"],
        "refusing": ["judged-values"],
    }
    assert "aten::mul" in found["borrowed"]["judged"]["dispatched"]
    assert found["own"]["judged"]["compared"] > 8
    assert found["refusing"]["judged"]["compared"] == 0
    reference = hashlib.sha256((FOLDER / "doubled.py").read_bytes()).hexdigest()
    assert {each["reference_sha256"] for each in found.values()} == {reference}


@pytest.mark.slow
def test_a_seed_that_is_given_repeats_a_run_and_is_stated(tmp_path: Path) -> None:
    code, statement = judge(tmp_path, "own", seed=7)
    assert code == 0
    assert statement["predicate"]["ok"]
    assert statement["predicate"]["seed"] == 7
    assert not statement["predicate"]["seed_drawn_after_build"]


@pytest.mark.slow
def test_a_reference_that_loads_the_kernel_is_no_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, statement = judge(tmp_path, "own", reference=f"{FOLDER / 'doubled.py'}:loading")
    assert (code, statement) == (2, None)
    assert "loads candidates::own, the operator that it is to judge" in capsys.readouterr().err


def test_without_a_reference_there_is_nothing_to_judge_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "check", str(KERNELS), "--candidate", str(tmp_path / "out.json")]) == 2
    assert "--reference for each operator" in capsys.readouterr().err
