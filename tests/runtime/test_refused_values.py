"""No value of an input ends a process: what eager refuses, the package refuses, and the next call is right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import exportkit
from exportkit.errors import ModelRunError, RefusedValueError, SessionBrokenError
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.statuses import BadRequestError
from tests.artifacts import ROOT, artifact
from tests.drawn import examples
from tests.runtime import exportkit_run, refusing_models, ways
from tests.runtime.threads import together
from tests.serve.engine.asking import GATHERING, play, request, tensors
from tests.subprocesses import run_python

INTEGERS = (-11, -10, -1, 0, 9, 10, 1_000_000_007, torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min)
FLOATS = (float("nan"), float("inf"), float("-inf"), -1e30, 1e30)
NAMES = ("ids", "x", "divisor", "row", "count")
MOST_ROWS = 1000  # of what an input asks to allocate

ATTACK = """
import sys
from pathlib import Path
from tools.hostile_values import attack
print(attack(Path(sys.argv[1]), device="cpu", graphs=False))
"""


@pytest.fixture(scope="module", params=ways.PYTHON)
def model(request: pytest.FixtureRequest) -> Iterator[exportkit.Model]:
    yield from ways.opened(request, artifact("lookups"))


@pytest.fixture(scope="module", params=ways.EVERY)
def notebook(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from ways.opened(request, artifact("notebook"))


@pytest.fixture(scope="module")
def eager() -> torch.nn.Module:
    return refusing_models.Lookups().eval()


def arguments() -> dict[str, torch.Tensor]:
    return dict(zip(NAMES, refusing_models.lookups().example_inputs))


def agree(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name in one:
        torch.testing.assert_close(one[name], other[name], equal_nan=True, rtol=1e-4, atol=1e-4)


def held_to_eager(model: exportkit.Model, eager: torch.nn.Module, changed: dict[str, torch.Tensor]) -> None:
    """Eager refuses exactly what the package refuses, and the next call is right."""
    try:
        expected = eager(**changed)
    except (IndexError, RuntimeError, ZeroDivisionError):
        with pytest.raises(ModelRunError):
            model(**changed)
    else:
        agree(model(**changed), expected)
    usual = arguments()
    agree(model(**usual), eager(**usual))


@pytest.mark.slow_but("here*")
@pytest.mark.parametrize("name", NAMES)
def test_what_eager_refuses_is_refused_and_the_next_call_is_right(model, eager, name):
    for value in FLOATS if name == "x" else INTEGERS:
        if name == "count" and MOST_ROWS < value < torch.iinfo(torch.int64).max:
            continue
        changed = arguments()
        changed[name] = changed[name].clone()
        changed[name].view(-1)[:1] = value
        held_to_eager(model, eager, changed)


@pytest.mark.slow_but("here*")
@given(values=st.lists(st.integers(-12, 12), min_size=4, max_size=9), data=st.data())
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drawn_values_are_refused_where_eager_refuses_them(model, eager, values, data):
    n = len(values)
    divisor = data.draw(st.lists(st.integers(-2, 2), min_size=n, max_size=n))
    row, count = data.draw(st.integers(-3, n + 2)), data.draw(st.integers(-2, 4))
    changed = {
        "ids": torch.tensor(values),
        "x": torch.rand(n, 12),
        "divisor": torch.tensor(divisor),
        "row": torch.tensor(row),
        "count": torch.tensor(count),
    }
    held_to_eager(model, eager, changed)


def test_an_index_into_nothing_is_refused_and_none_into_nothing_answered(model, eager):
    unchosen, unpicked = arguments(), arguments()
    unchosen["x"].fill_(-200)  # no row is chosen
    unpicked["x"][:, 1] = -200  # no row is picked, and none is looked up
    with pytest.raises(IndexError):
        eager(**unchosen)
    eager(**unpicked)
    for changed in (unchosen, unpicked):
        held_to_eager(model, eager, changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "columns", "counts", "blocks"])
def test_attention_refuses_what_its_functions_and_its_mask_read(runtime, name):
    usual = refusing_models.attention_inputs()
    with exportkit.load(artifact("attention")) as model:
        expected = model(**usual)
        for value in (-9, 8, 1_000_000_007, -1_000_000_007):
            with pytest.raises(RefusedValueError, match=rf"refusing_models.py:\d+ in forward: index {value} is out of"):
                model(**usual | {name: torch.full_like(usual[name], value)})
            torch.testing.assert_close(model(**usual), expected)
        counts, blocks = torch.ones_like(usual["counts"]), torch.tensor([[[[0, 99], [1, -99]]]], dtype=torch.int32)
        model(**usual | {"counts": counts, "blocks": blocks})  # a block that does not count may be any


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ids", 10, r"index 10 is out of range: from 0 to 9 are allowed"),
        ("ids", -6, r"index -6 is out of range: from 0 to 9 are allowed"),
        ("divisor", 0, r"an integer is divided by zero"),
        ("x", -1e5, r"x must be above -10000"),
        ("row", 6, r"6"),
        ("count", -2, r"-2"),
    ],
)
def test_the_error_names_the_value_and_what_is_allowed(model, name, value, said):
    changed = arguments()
    changed[name] = changed[name].clone()
    changed[name].view(-1)[:1] = value
    with pytest.raises(RefusedValueError, match=said) as caught:
        model(**changed)
    if name in ("ids", "divisor"):
        assert "refusing_models.py:" in caught.value.message  # the line of the model
    assert caught.value.hint


def test_calls_at_the_same_time_hear_of_their_own_values_alone(runtime):
    with exportkit.load(artifact("words"), runners=4) as model:
        good, bad = torch.tensor([[1, 2]]), torch.tensor([[1, 10]])
        expected = model(good)

        def call(ids: torch.Tensor) -> None:
            for _ in range(200):
                if ids is good:
                    assert torch.equal(model(ids), expected)
                    continue
                with pytest.raises(RefusedValueError):
                    model(ids)

        together(call, [good, bad, good, bad])


@pytest.mark.slow
def test_a_session_that_wrote_a_refused_value_is_broken_until_it_is_reset(notebook):
    token, first = torch.tensor([3]), torch.tensor([0])
    with notebook.session() as one, notebook.session() as two:
        expected = one.forward(token, first)
        assert torch.equal(two.forward(token, first), expected)
        for changed in ((torch.tensor([10]), first), (token, torch.tensor([16])), (token, torch.tensor([-1]))):
            with pytest.raises(RefusedValueError, match="is out of range: from 0 to"):
                one.forward(*changed)
            with pytest.raises(SessionBrokenError):
                one.forward(token, first)
            assert torch.equal(two.forward(token, first), expected)  # another session's state is its own
            one.reset()
            assert torch.equal(one.forward(token, first), expected)


@pytest.mark.slow_but("lookups")
@pytest.mark.parametrize("name", ["lookups", "words", "weighted", "rotated", "recurrent", "patches", "arr-coc"])
def test_no_value_ends_a_process(name):
    said = run_python(ATTACK, artifact(name), cwd=ROOT, PYTHONPATH=str(ROOT))
    answered, refused = (int(word) for word in said.split() if word.isdigit())
    assert answered + refused > 0
    assert refused > 0 or name not in ("lookups", "words")


# --- C++ --------------------------------------------------------------------------------------------------------


def test_exportkit_run_says_what_was_refused(tmp_path):
    save_file({"ids": torch.tensor([[1, 99]])}, tmp_path / "inputs.safetensors")
    answer = exportkit_run.run(artifact("words"), "--input", tmp_path / "inputs.safetensors")
    assert answer.code == 1
    assert answer.document["error"]["kind"] == "RefusedValueError"
    assert "index 99 is out of range" in answer.document["error"]["message"]


# --- a server ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolate", [False, True])
def test_a_server_refuses_the_request_alone_and_answers_those_of_its_batch(isolate):
    async def scenario(served: ServedModel) -> None:
        good = {"ids": torch.tensor([[1, 2]])}
        (expected,) = tensors(await served.infer(request(good))).values()
        for value in (-1, 10, 2**62):
            bad = {"ids": torch.tensor([[1, value]])}
            asked = [served.infer(request(each)) for each in (good, bad, good)]
            first, refused, last = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(refused, BadRequestError), refused
            assert refused.status == 400
            assert f"index {value} is out of range" in refused.message
            for answer in (first, last):
                assert torch.equal(*tensors(answer).values(), expected)

    play(artifact("words"), scenario, batch=GATHERING, isolate=isolate)
