"""examples/llm: the package writes what transformers' `generate` writes, in Python and in C++, and needs it no more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import exportkit
from tests.examples import example_packages
from tests.operators.scaffold.scaffolded import imported
from tests.subprocesses import output_of, run_python

pytest.importorskip("transformers", reason="pip install -c constraints.txt 'exportkit[transformers]'")

FOLDER = example_packages.EXAMPLES / "llm"
TEXTS = ["Call me Ishmael.", "It was", "The sky above the port was the color of television"]
COUNT = 200


@pytest.fixture(scope="module")
def loops() -> ModuleType:
    """generate.py."""
    return imported("example_llm_generate", FOLDER / "generate.py")


@pytest.fixture
def reference(device: torch.device) -> Any:
    """The model, of transformers."""
    return imported("example_llm", FOLDER / "llm.py").small().to(device)


@pytest.fixture
def package(device: torch.device) -> Path:
    return example_packages.made("llm", device.type)


@pytest.fixture
def model(package: Path, device: torch.device) -> Iterator[exportkit.Model]:
    with exportkit.load(package, str(device)) as loaded:
        yield loaded


def wanted(reference: Any, text: str, count: int = COUNT, **options: Any) -> list[int]:
    tokens = torch.tensor([list(text.encode())], device=reference.device)
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": count, **options}
    written = reference.generate(tokens, attention_mask=torch.ones_like(tokens), **given)
    return list(written[0, tokens.shape[1] :].tolist())


def written(loops: ModuleType, model: exportkit.Model, texts: list[str], choose: Any, count: int = COUNT) -> Any:
    with model.session(batch=len(texts)) as session:
        logits = loops.read(session, [list(text.encode()) for text in texts], device=model.device)
        return torch.cat(list(islice(loops.generate(session, logits, choose), count)), dim=1).tolist()


def test_texts_of_different_lengths_go_on_as_generate_s(loops, model, reference) -> None:
    expected = [wanted(reference, text) for text in TEXTS]
    assert written(loops, model, TEXTS, loops.greedy) == expected
    assert len({token for row in expected for token in row}) > 50


def test_drawn_tokens_are_generate_s(loops, model, reference) -> None:
    options = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    torch.manual_seed(7)
    expected = wanted(reference, TEXTS[0], do_sample=True, **options)
    torch.manual_seed(7)
    assert written(loops, model, TEXTS[:1], loops.sampler(**options)) == [expected]


def test_a_long_text_is_read_in_several_calls(loops, model, reference) -> None:
    long = " ".join(TEXTS * 3)
    assert len(long) > 3 * 64
    assert written(loops, model, [long, "A"], loops.greedy, 20) == [wanted(reference, each, 20) for each in (long, "A")]


def test_generate_py_needs_no_transformers(package: Path, reference, device: torch.device, tmp_path: Path) -> None:
    script = """
import runpy, sys
sys.modules["transformers"] = None  # importing it would fail
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    said = run_python(script, FOLDER / "generate.py", package, *TEXTS, "--count", "40", cwd=tmp_path)
    texts = [bytes(wanted(reference, text, 40)).decode(errors="replace") for text in TEXTS]
    assert "\n".join(f"{text!r}: {found}" for text, found in zip(TEXTS, texts)) in said


def test_cpp_writes_the_same(generator: Path, package: Path, reference) -> None:
    def said(*arguments: str) -> list[list[int]]:
        printed = output_of(generator, package, *arguments)
        return [list(map(int, line.split())) for line in printed.splitlines()]

    found = said(str(COUNT), *TEXTS)
    assert list(map(list, zip(*found))) == [wanted(reference, text) for text in TEXTS]
    draw = ("60", "--temperature", "0.9", "--top-k", "20", "--seed")
    first = said(*draw, "3", *TEXTS)
    assert said(*draw, "3", *TEXTS) == first
    assert said(*draw, "4", *TEXTS) != first
    assert said("60", "--temperature", "0.5", "--top-k", "1", *TEXTS) == found[:60]
