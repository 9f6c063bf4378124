"""exportkit.h with a package that `export` made of a model with state: its weights are swapped under a session."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import exportkit
from exportkit.errors import WeightsError
from tests.artifacts import artifact
from tests.runtime import c_interface, exportkit_run
from tests.runtime.c_interface import view
from tests.verify.state_models import WIDTH, Decoder


def decode(session: c_interface.Session, eager: Decoder, token: int) -> None:
    """One step, in the session and in the eager module, whose answers and written inputs must be alike."""
    tokens, heard = np.full((2, 1), token), np.zeros((2, WIDTH), np.float32)
    expected_heard = torch.zeros(2, WIDTH)
    expected = eager.decode(torch.from_numpy(tokens), expected_heard)
    (scores,) = session.run("decode", view(tokens), view(heard))
    torch.testing.assert_close(torch.from_dlpack(scores), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(heard), expected_heard, rtol=1e-4, atol=1e-4)


def test_recorded_sequences_are_replayed_in_c_and_by_exportkit_run(c_library):
    with c_library.open(artifact("decoder")) as model:
        for index in range(model.about.case_count):
            model.replay(index)
    document = exportkit_run.load(artifact("decoder"))
    assert document["ok"] is True
    assert {len(case["calls"]) > 1 for case in document["cases"]} == {True, False}


def test_a_session_goes_on_with_swapped_weights_and_its_own_state(c_library, tmp_path):
    torch.manual_seed(7)
    with c_library.open(artifact("decoder")) as model, torch.no_grad():
        session, state = model.session(batch=2), dict[str, torch.Tensor]()
        for number in range(2):
            eager = Decoder().eval()
            save_file({name: t.contiguous() for name, t in eager.state_dict().items()}, tmp_path / "new.safetensors")
            model.swap_weights(tmp_path / "new.safetensors")  # which has the state as well, as sessions begin with it
            for name, tensor in state.items():
                eager.get_buffer(name).copy_(tensor)
            for step in range(3):
                decode(session, eager, 1 + number + step)
            state = {name: torch.from_numpy(array.copy()) for name, array in session.state().items()}
            for name, tensor in state.items():
                torch.testing.assert_close(tensor, eager.get_buffer(name).detach(), rtol=1e-4, atol=1e-4)


def test_weights_with_other_state_are_refused_in_pythons_words(c_library, tmp_path):
    state = {name: tensor.clone() for name, tensor in Decoder().state_dict().items()}
    state["position"] += 1
    state["keys_0"][0, 0, 0] = 1e-40
    state["bias"] = state["bias"][:1].contiguous()  # what sessions begin with, in another number of rows
    save_file(state, tmp_path / "used.safetensors")
    with exportkit.load(artifact("decoder")) as model, pytest.raises(WeightsError) as python:
        model.swap_weights(tmp_path / "used.safetensors")
    assert "do not begin with: keys_0, position\n" in str(python.value)
    with c_library.open(artifact("decoder")) as model, pytest.raises(c_interface.Refused) as c:
        model.swap_weights(tmp_path / "used.safetensors")
    assert f"{c.value.message}\n  {c.value.hint}" == str(python.value)
