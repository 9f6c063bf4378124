"""`exportkit ops check --candidate`: what a program may write to please a check is found, and a statement says so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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


def test_a_reference_that_takes_no_call_is_said_with_its_error(tmp_path: Path) -> None:
    code, statement = judge(tmp_path, "own", reference=f"{FOLDER / 'doubled.py'}:two")
    (operator,) = statement["predicate"]["operators"]
    (finding,) = operator["findings"]
    assert code == 1
    assert "TypeError: two() missing 1 required positional argument: 'y'." in finding["message"]
    assert finding["hint"].endswith("with the parameters of candidates::own(Tensor x) -> Tensor.")
    assert operator["judged"]["calls"] == 0


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


def time_it(tmp_path: Path, name: str, *options: str, reference: str = "doubled", calls: str = "to_time") -> int:
    file = FOLDER / "doubled.py"
    given = [f"--reference={name}={file}:{reference}", f"--calls=candidates::{name}={file}:{calls}"]
    files = ["--output", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]
    return main(["bench", "ops", "--candidate", str(KERNELS), "--seconds", "0.1", *given, *files, *options])


def test_a_kernel_is_timed_beside_its_reference_on_values_that_no_cache_holds(tmp_path: Path, capsys) -> None:
    assert time_it(tmp_path, "own", "--against", "eager") == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["subject"], row["size"], row["dtype"]) == ("candidates::own", "300x7", "float32")
    assert row["moved_bytes"] == 2 * 300 * 7 * 4
    own, eager = row["measurements"]
    assert own["name"] == "candidate"
    assert "candidate ms" in capsys.readouterr().out
    assert "caches were filled" in own["note"]
    assert "clock" in own["note"]
    for each in (own, eager):
        assert each["call"]["count"] >= 5
        assert each["call"]["median"] > 0
    picture = ElementTree.parse(tmp_path / "out.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}rect")) == 2


def test_a_kernel_that_takes_no_tensor_is_timed(tmp_path: Path) -> None:
    assert time_it(tmp_path, "ramp", "--against", "eager", reference="ramp", calls="ramps_to_time") == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["size"], row["dtype"], row["moved_bytes"]) == ("300", "float32", 300 * 4)


WRONG = "An answer of the kernel's process must"


@pytest.mark.parametrize(
    ("name", "device", "why"),
    [
        ("keeping", "cpu", WRONG),
        ("patched", "cpu", WRONG),
        pytest.param("aside", "cuda", WRONG, marks=pytest.mark.cuda),  # before its inputs are there
        ("crashing", "cpu", "The process of the kernel was killed by SIGABRT"),
    ],
)
def test_a_kernel_that_is_wrong_or_ends_its_process_is_not_timed(tmp_path: Path, name, device, why, capsys) -> None:
    assert time_it(tmp_path, name, "--against", "eager", "--device", device) == 1
    assert f"candidates::{name} is not timed. {why}" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("name", "functions", "code", "said"),
    [
        ("owl", {}, 2, "there is no operator 'owl'\n  There are: candidates::aside, "),
        ("own", {"calls": "words"}, 1, "is not timed. The kernel refuses call 0 of "),
        ("own", {"calls": "keywords"}, 1, "Give calls that it takes: its schema is candidates::own(Tensor x)"),
        ("own", {"calls": "sets"}, 2, "a call has an argument of type set"),
        ("own", {"reference": "two"}, 1, "with the parameters of candidates::own(Tensor x) -> Tensor."),
        ("own", {"reference": "raising"}, 1, "doubled.py:to_time: ValueError: not today."),
        ("own", {"reference": "ending"}, 1, "the process of the reference was killed by SIGABRT"),
    ],
    ids=["owl", "words", "keywords", "sets", "two", "raising", "ending"],
)
@pytest.mark.slow_but("owl", "keywords", "two")
def test_what_cannot_be_timed_is_said_in_words(tmp_path, name, functions, code, said, capsys):
    assert time_it(tmp_path, name, "--against", "eager", **functions) == code
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_reference_that_does_not_compile_can_be_timed_in_eager_as_is_advised(tmp_path: Path, capsys) -> None:
    assert time_it(tmp_path, "own", "--against", "compile", reference="eager_only") == 2
    said = capsys.readouterr().err
    assert "torch.compile does not take the reference: " in said
    assert "--against eager." in said
    assert time_it(tmp_path, "own", "--against", "eager", reference="eager_only") == 0


def test_what_is_timed_needs_a_reference_and_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ops", "--candidate", str(KERNELS)]) == 2
    assert "--candidate needs --reference" in capsys.readouterr().err
    assert time_it(tmp_path, "own", "--size", "300") == 2
    assert "--size cannot be given with --candidate" in capsys.readouterr().err
