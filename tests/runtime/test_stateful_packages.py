"""A package that `export` made of a model with state: its recorded sequences, its weights, and several sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from exportkit.errors import WeightsError
from tests.artifacts import artifact
from tests.runtime import ways
from tests.runtime.stateful import bits
from tests.verify.state_models import WIDTH, Decoder


@pytest.fixture(scope="module", params=ways.EVERY)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from ways.opened(request, artifact("decoder"))


def greedy(session: Any, tokens: int) -> list[torch.Tensor]:
    """A text from its first tokens on: scores, and what is written into an input."""
    scores = session.prefill(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    found = [scores]
    for _ in range(tokens):
        heard = torch.zeros(2, WIDTH)
        scores = session.decode(scores.argmax(-1, keepdim=True), heard)
        found += [scores, heard]
    return found


def close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-4)


def test_they_are_replayed_in_c(c_library):
    with c_library.open(artifact("decoder")) as model:
        for index in range(model.about.case_count):
            model.replay(index)


def test_sessions_go_on_with_swapped_weights_and_all_methods_have_them(model):
    torch.manual_seed(7)
    first, second = Decoder().eval(), Decoder().eval()
    x, y = torch.randn(2, 3, WIDTH)
    with torch.no_grad(), model.session(batch=2) as session:
        for eager in (first, second):
            model.swap_weights(eager.state_dict())  # which has the state as well, as sessions begin with it
            assert not session.state["position"]
            close(greedy(session, 4), greedy(eager, 4))
            torch.testing.assert_close(model.similar(x, y), eager.similar(x, y), rtol=1e-4, atol=1e-4)
            session.reset()
        # In the middle of a text: the state of the old weights, read by the code with the new ones.
        model.swap_weights(weights_of(first))
        close(greedy(session, 2), greedy(fresh := with_weights(first), 2))
        before = bits(session.state)
        model.swap_weights(weights_of(second))
        assert bits(session.state) == before
        mixed = with_weights(second)
        for name, tensor in fresh.named_buffers():
            mixed.get_buffer(name).copy_(tensor)
        for _ in range(3):
            token, heard = torch.tensor([[1], [2]]), torch.zeros(2, WIDTH)
            expected = mixed.decode(token, heard.clone())
            torch.testing.assert_close(session.decode(token, heard), expected, rtol=1e-4, atol=1e-4)


def test_state_that_sessions_do_not_begin_with_is_no_part_of_other_weights(model):
    """A swap would not take it, so that a fine-tune that begins otherwise would answer otherwise."""
    torch.manual_seed(8)
    eager, alone = Decoder().eval(), torch.randn(1, 3, WIDTH)
    wanted = model.similar(*alone.expand(2, -1, -1))
    given = eager.state_dict()
    for changed in (
        {"position": given["position"] + 1},
        {"bias": given["bias"][:, :3]},
        {"keys_0": given["keys_0"] + 1},
    ):
        with pytest.raises(WeightsError, match=f"state that sessions do not begin with: {next(iter(changed))}\n"):
            model.swap_weights({**given, **changed})
        assert torch.equal(model.similar(*alone.expand(2, -1, -1)), wanted)
    model.swap_weights({**given, "bias": given["bias"][:1].expand(5, -1)})  # rows are alike, however many
    assert not torch.equal(model.similar(*alone.expand(2, -1, -1)), wanted)


def weights_of(eager: Decoder) -> dict[str, torch.Tensor]:
    """Without the state, which is another after calls."""
    state = {name for name, _ in eager.named_buffers()}
    return {name: tensor for name, tensor in eager.state_dict().items() if name not in state}


def with_weights(eager: Decoder) -> Decoder:
    """The same weights, and the state of a new session."""
    new = Decoder().eval()
    for name, parameter in eager.named_parameters():
        new.get_parameter(name).data.copy_(parameter)
    return new
