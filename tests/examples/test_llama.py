"""examples/llama: a session writes what eager writes, token by token."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import exportkit
from tests.examples import example_packages
from tests.operators.scaffold.scaffolded import imported

FOLDER = example_packages.EXAMPLES / "llama"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1]]
COUNT = 24


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, which finds `generate` beside it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return imported("example_llama", FOLDER / "llama.py")


@pytest.fixture
def greedy(llama: ModuleType):
    """The loop of generate.py."""
    return imported("example_generate", FOLDER / "generate.py").greedy


def written(greedy, of, prompt: list[int], device: torch.device) -> list[int]:
    with torch.no_grad():
        tokens = greedy(of.prefill, of.decode, torch.tensor([prompt], device=device))
        return [int(token) for token in itertools.islice(tokens, COUNT)]


def eager(llama: ModuleType, batch: int, device: torch.device):
    return llama.make(llama.Config(), batch).to(device)


def package(device: torch.device) -> Path:
    return example_packages.made("llama", device.type)


def test_eager_writes_what_it_writes_without_a_cache(llama: ModuleType, greedy) -> None:
    """The oracle of the oracle: the whole text in one prefill, for each token."""
    text, cpu = list(PROMPTS[0]), torch.device("cpu")
    with torch.no_grad():
        for _ in range(COUNT):
            text.append(int(eager(llama, 1, cpu).prefill(torch.tensor([text])).argmax()))
    assert text[len(PROMPTS[0]) :] == written(greedy, eager(llama, 1, cpu), PROMPTS[0], cpu)
    assert len(set(text)) > 8  # not one token again and again, which errors would write, too


def test_two_sessions_in_turns_write_eager_s_tokens(llama: ModuleType, greedy, device: torch.device) -> None:
    expected = [written(greedy, eager(llama, 1, device), prompt, device) for prompt in PROMPTS]
    with exportkit.load(package(device), str(device)) as model:
        sessions = [model.session(batch=1) for _ in PROMPTS]
        prompts = [torch.tensor([prompt], device=device) for prompt in PROMPTS]
        turns = zip(*(greedy(each.prefill, each.decode, prompt) for each, prompt in zip(sessions, prompts)))
        texts = [[int(token) for token in tokens] for tokens in itertools.islice(turns, COUNT)]
        assert list(map(list, zip(*texts))) == expected
        positions = [int(each.state["position"]) for each in sessions]
        assert positions == [len(prompt) + COUNT - 1 for prompt in PROMPTS]


def test_prompts_in_parts_give_the_logits_of_the_whole(device: torch.device) -> None:
    tokens = torch.randint(0, 256, (1, 12), device=device)
    with exportkit.load(package(device), str(device)) as model:
        whole, parts = model.session(batch=1), model.session(batch=1)
        expected = whole.prefill(tokens)
        parts.prefill(tokens[:, :5])
        torch.testing.assert_close(parts.prefill(tokens[:, 5:]), expected, rtol=1e-4, atol=1e-4)


def test_generate_py_writes_eager_s_tokens(llama, greedy, monkeypatch, capsys) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(sys, "argv", ["generate.py", str(package(cpu))])
    imported("example_generate", FOLDER / "generate.py").main()
    lines = [list(map(int, line.split())) for line in capsys.readouterr().out.splitlines()]
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8]]
    assert lines == [written(greedy, eager(llama, 1, cpu), prompt, cpu)[:16] for prompt in prompts]
