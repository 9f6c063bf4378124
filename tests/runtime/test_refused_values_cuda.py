"""On a GPU, nobody waits for a call: what it refuses is said at the next one, or where somebody waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import exportkit
from exportkit.errors import RefusedValueError, SessionBrokenError
from tests.artifacts import artifact
from tests.runtime import refusing_models

pytestmark = pytest.mark.cuda

VALUES = (-1, 10, 1_000_000_007, 2**62)


@pytest.fixture(scope="module", params=["calls", "graphs"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"device": "cuda", "cuda_graphs": request.param == "graphs"}


@pytest.fixture
def model(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[exportkit.Model]:
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "cpp")
    with exportkit.load(artifact("words-cuda"), **options) as model:
        yield model


def ids(value: int = 2) -> torch.Tensor:
    return torch.tensor([[1, value]], device="cuda")


def test_the_next_call_says_what_the_last_one_refused_and_the_one_after_is_right(model):
    expected = model(ids()).clone()
    for value in VALUES:
        model(ids(value))
        torch.cuda.synchronize()
        with pytest.raises(RefusedValueError, match=rf"index {value} is out of range: from 0 to 9 are allowed"):
            model(ids())
        assert torch.equal(model(ids()), expected)
    assert torch.ones(3, device="cuda").sum().item() == 3  # the context lives


def test_synchronize_says_it_on_the_stream_of_the_call(model):
    expected, stream = model(ids()).clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(ids(99))
    torch.cuda.synchronize()
    assert torch.equal(model(ids()), expected)
    model.synchronize()
    with torch.cuda.stream(stream), pytest.raises(RefusedValueError, match="index 99"):
        model.synchronize()
    with torch.cuda.stream(stream):
        assert torch.equal(model(ids()), expected)
        model.synchronize()


def test_requests_say_it_themselves(model):
    answers = model.run_requests([[ids().cpu()]], [0])
    for value in VALUES:
        with pytest.raises(RefusedValueError, match=f"index {value}"):
            model.run_requests([[ids(value).cpu()]], [0])
        assert torch.equal(model.run_requests([[ids().cpu()]], [0]).outputs[0], answers.outputs[0])


def test_a_session_hears_of_its_own_calls_alone(options, monkeypatch, tmp_path):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "cpp")
    token, place = torch.tensor([3], device="cuda"), torch.tensor([0], device="cuda")
    with (
        exportkit.load(artifact("notebook-cuda"), **options) as model,
        model.session() as one,
        model.session() as two,
    ):
        expected = one(token, place).clone()
        for use in (lambda: one(token, place), one.fork, one.synchronize):
            assert torch.equal(two(token, place), expected)
            one(token + 20, place)
            torch.cuda.synchronize()
            assert torch.equal(two(token, place), expected)
            with pytest.raises(RefusedValueError, match="index 23 is out of range"):
                use()
            assert (one.broken, two.broken) == (True, False)
            with pytest.raises(SessionBrokenError):
                one(token, place)
            one.reset()
            assert torch.equal(one(token, place), expected)
        for wrong in (-1, 16):  # of an operator whose kernel takes no negative index
            one(token, place + wrong)
            with pytest.raises(RefusedValueError, match=f"index {wrong} is out of range: from 0 to 15"):
                one.synchronize()
            one.reset()
        one(token + 20, place)
        model.close()
        with pytest.raises(RefusedValueError, match="refused a value before the model was closed"):
            one.save(tmp_path / "lost.safetensors")
        two.save(tmp_path / "whole.safetensors")


@pytest.mark.parametrize("name", ["rows", "columns", "counts", "blocks"])
def test_attention_refuses_what_its_functions_and_its_mask_read(options, monkeypatch, name):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "cpp")
    usual = {name: value.cuda() for name, value in refusing_models.attention_inputs().items()}
    with exportkit.load(artifact("attention-cuda"), **options) as model:
        expected = [output.clone() for output in model(**usual)]
        for value in (-9, 8, 1_000_000_007):
            model(**usual | {name: torch.full_like(usual[name], value)})
            with pytest.raises(RefusedValueError, match=f"index {value} is out of range"):
                model.synchronize()
            torch.testing.assert_close(model(**usual), tuple(expected))
            model.synchronize()


def test_a_worker_says_it_at_once():
    with exportkit.load(artifact("words-cuda"), device="cuda", isolate=True) as model:
        expected = model(ids()).clone()
        for value in VALUES:
            with pytest.raises(RefusedValueError, match=f"index {value}"):
                model(ids(value))
            assert torch.equal(model(ids()), expected)


def test_every_operator_refuses_what_it_has_to(options, monkeypatch):
    monkeypatch.setenv("EXPORTKIT_RUNTIME", "cpp")
    usual = {name: each.cuda() for name, each in zip(("ids", "x"), refusing_models.lookups_of_tensors_inputs())}
    with exportkit.load(artifact("lookups-cuda"), **options) as model:
        expected = {name: each.clone() for name, each in model(**usual).items()}
        for value in VALUES:
            changed = usual | {"ids": usual["ids"].clone()}
            changed["ids"][0] = value
            model(**changed)
            with pytest.raises(RefusedValueError, match="is out of range"):
                model.synchronize()
            for name, each in model(**usual).items():
                torch.testing.assert_close(each, expected[name], rtol=1e-4, atol=1e-4)
            model.synchronize()
