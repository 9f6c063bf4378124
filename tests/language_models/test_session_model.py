"""The module of exportkit.transformers writes what `generate` writes, row by row, for each kind of memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import llm
from exportkit import ExportSpec
from exportkit.transformers.session_model import SessionModel

LENGTH = llm.LENGTH


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@functools.cache
def model(name: str) -> Any:
    return llm.small_model(name)


@functools.cache
def spec(name: str) -> ExportSpec:
    return llm.small(name)


def session(name: str, batch: int = 1, length: int = LENGTH) -> SessionModel:
    made = spec(name).model
    assert isinstance(made, SessionModel)
    return SessionModel(made.model, made.forms, length, batch)


def padded(texts: list[list[int]], count: int) -> tuple[Tensor, Tensor]:
    rows = [text + [0] * (count - len(text)) for text in texts]
    return torch.tensor(rows), torch.tensor([len(text) for text in texts])


def state(of: SessionModel, row: int) -> list[Tensor]:
    return [buffer[row].clone() for buffer in (of.position, *of.cache.buffers())]


@pytest.mark.slow_but("llama")
@pytest.mark.parametrize("name", llm.SIX)
def test_rows_of_a_batch_are_what_generate_writes_after_each_prompt(name: str) -> None:
    texts = llm.prompts(llm.VOCABULARY)
    expected = [llm.wanted(model(name), text) for text in texts]
    assert len({token for row in expected for token in row}) > 50  # else an error could write the same
    assert llm.written(session(name, len(texts)), texts) == expected


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "mamba2"])
def test_a_prompt_in_parts_gives_the_logits_of_the_whole(name: str) -> None:
    """Parts of other lengths in each row, past the window of gemma3."""
    tokens = torch.randint(1, llm.VOCABULARY, (2, 80), generator=torch.Generator().manual_seed(3))
    whole = model(name)(input_ids=tokens, use_cache=False).logits
    parts, done = session(name, 2), torch.zeros(2, dtype=torch.int64)
    for lengths in ([32, 1], [0, 32], [20, 31], [28, 16]):
        now = torch.tensor(lengths)
        text = [row[begin : begin + size].tolist() for row, begin, size in zip(tokens, done.tolist(), lengths)]
        logits = parts.prefill(*padded(text, 32))
        done += now
        for row in range(2):
            if lengths[row]:
                torch.testing.assert_close(logits[row], whole[row, done[row] - 1], rtol=1e-4, atol=1e-4)
    assert parts.position.tolist() == [80, 80]


@pytest.mark.parametrize("name", ["gemma3", "mamba2"])
def test_a_row_without_tokens_stays_as_it_is(name: str) -> None:
    made = session(name, 2)
    made.prefill(*padded([[1, 2, 3], [4, 5]], 3))
    before, other = state(made, 0), state(made, 1)
    made.prefill(*padded([[], [6, 7]], 2))
    assert all(torch.equal(one, two) for one, two in zip(state(made, 0), before))
    assert not all(torch.equal(one, two) for one, two in zip(state(made, 1), other))


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_what_follows_a_row_s_tokens_is_not_read(name: str) -> None:
    one, other = session(name, 2), session(name, 2)
    tokens, lengths = padded([[1, 2, 3, 4], [5, 6]], 4)
    logits = one.prefill(tokens, lengths)
    tokens[1, 2:] = 99
    assert torch.equal(other.prefill(tokens, lengths), logits)
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers()))
    more = session(name, 2).prefill(tokens, torch.tensor([900, 2]))  # as many as there are
    assert torch.equal(more, logits)


def test_a_full_row_answers_nan_and_disturbs_no_other() -> None:
    length = 12
    made, alone = session("llama", 2, length), session("llama", 1, length)
    logits = made.prefill(*padded([[1] * 10, [7, 8]], 10))
    alone.prefill(*padded([[7, 8]], 2))
    for token in range(1, 6):
        logits = made.decode(torch.tensor([[token], [token]]))
        expected = alone.decode(torch.tensor([[token]]))
        assert bool(logits[0].isnan().all()) is (token > 2)
        torch.testing.assert_close(logits[1:], expected, rtol=1e-4, atol=1e-4)
    assert made.prefill(*padded([[3], [4, 5]], 2))[0].isnan().all()
    assert not any(buffer.isnan().any() for buffer in made.cache.buffers())


def test_a_window_keeps_no_more_than_it_needs() -> None:
    slots = [form.shapes["keys"][1] for form in spec("gemma3").model.forms]
    assert slots == [31 + llm.PROMPT, LENGTH, 31 + llm.PROMPT]  # what a call's first token sees, and the call's own


def test_the_model_stays_as_it_was() -> None:
    one = model("mixtral")
    before = (one.config._attn_implementation, one.config._experts_implementation, list(one.state_dict()))
    session("mixtral").prefill(*padded([[1, 2]], 2))
    assert (one.config._attn_implementation, one.config._experts_implementation, list(one.state_dict())) == before
