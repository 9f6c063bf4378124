"""`exportkit.self_test`: a loaded model must answer its recorded cases, those with state too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import exportkit
from exportkit.errors import ModelClosedError, WrongResultError
from exportkit.package.manifest import Manifest
from tests.artifacts import artifact
from tests.runtime.fine_tunes import state
from tests.verify.state_models import WIDTH, Decoder
from tests.verify.test_injected_state import other_begin, rewritten, swapped


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
def test_a_model_with_state_is_tested_in_sessions_and_keeps_nothing_of_them(isolate: bool) -> None:
    with exportkit.load(artifact("decoder"), isolate=isolate) as model:
        x, y = torch.randn(2, 3, WIDTH)
        before = model.similar(x, y)
        exportkit.self_test(model)
        assert torch.equal(model.similar(x, y), before)
        with model.session(batch=2) as session:
            assert not session.state["position"]


def test_a_model_without_state_is_tested() -> None:
    with exportkit.load(artifact("weighted"), device="cpu") as model:
        assert len(model.cases) > 0
        exportkit.self_test(model)
        with pytest.raises(AttributeError, match="in eval mode"):
            model.eval()
        model.swap_weights(state(1))
        with pytest.raises(WrongResultError, match="After `swap_weights` that is right"):
            exportkit.self_test(model)
    with pytest.raises(ModelClosedError):
        exportkit.self_test(model)


def test_what_is_written_is_tested_too_as_with_a_package_of_any_format() -> None:
    with exportkit.load(Path(__file__).parents[1] / "golden" / "state-1-cpu.pt2") as model:
        assert any(call.written for case in model.cases for call in case.calls)
        exportkit.self_test(model)


def other_end(manifest: Manifest, records: dict[str, Any]) -> Manifest:
    """The position at the end of each case is another."""
    for case in manifest.cases:
        tensors = load(records[case.record])
        records[case.record] = save(tensors | {n: t + 1 for n, t in tensors.items() if n == "state.5"})
    return manifest


@pytest.mark.parametrize(
    ("change", "said"),
    [(swapped, "call 1: 0: "), (other_begin, "call 0: 0: "), (other_end, "state position: 1 of 1 elements differ")],
)
def test_a_wrong_answer_and_a_wrong_state_are_named(change: Any, said: str, tmp_path: Path) -> None:
    wrong = rewritten(artifact("decoder"), tmp_path / "wrong.pt2", change)
    words = rf"answers its recorded case \d wrongly on cpu: {said}"
    with exportkit.load(wrong) as model, pytest.raises(WrongResultError, match=words):
        exportkit.self_test(model)


def test_other_weights_do_not_answer_the_recorded_cases() -> None:
    torch.manual_seed(7)
    with exportkit.load(artifact("decoder")) as model:
        model.swap_weights(Decoder().state_dict())
        with pytest.raises(WrongResultError, match="case 0 wrongly on cpu: 0: less accurate than eager"):
            exportkit.self_test(model)
