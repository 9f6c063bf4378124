"""Weights come back as they were written, and files that do not fit are refused as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exportkit.arr_coc.model import build, load_weights, save_weights
from exportkit.errors import WeightsError
from tests.arr_coc.model.model_cases import FILTERS_14, VIT, answer, inputs

pytestmark = pytest.mark.usefixtures("two_blocks")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_weights(build(**VIT, seed=1), path)
    return path


def _changed(path: Path, **changes: torch.Tensor | None) -> Path:
    state = {**load_file(path), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    return path


def test_a_model_written_and_read_answers_as_before(written: Path):
    original, other = build(**VIT, seed=1), build(**VIT, weights=written)
    args = inputs(original, 2, 5, 6)
    expected, outputs = answer(original, *args), answer(other, *args)
    assert all(torch.equal(outputs[name], expected[name]) for name in expected)


def test_an_encoder_alone_can_be_loaded(tmp_path: Path):
    trained, path = build(**VIT, seed=5), tmp_path / "encoder.safetensors"
    save_weights(trained.encoder, path)
    model = build(**VIT, encoder_weights=path)
    image, _ = inputs(model, 1, 4, 5)
    assert torch.equal(model.encode(image), trained.encode(image))
    assert not torch.equal(model.balancing.balancer.hidden.weight, trained.balancing.balancer.hidden.weight)


def test_weights_are_converted_to_the_models_dtype(written: Path):
    model = build(**VIT).to(torch.bfloat16)
    load_weights(model, written)
    assert model.encoder.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.encoder.cls_token.detach(), build(**VIT, seed=1).encoder.cls_token.to(torch.bfloat16))


def test_fixed_filters_are_no_weights(tmp_path: Path):
    save_weights(build(**FILTERS_14), tmp_path / "weights.safetensors")
    names = load_file(tmp_path / "weights.safetensors")
    assert {name.split(".")[0] for name in names} == {"balancing", "query_projection"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder__cls_token": None}, "does not fit ARRCOC: 1 missing: encoder.cls_token"),
        ({"head__weight": torch.zeros(3)}, "1 unexpected: head.weight"),
        (
            {"encoder__cls_token": torch.zeros(1, 192)},
            r"1 with another shape: encoder.cls_token is \[1, 192\], must be \[1, 1, 192\]",
        ),
        (
            {"encoder__cls_token": torch.zeros(1, 1, 192).long()},
            "encoder.cls_token is torch.int64, must be torch.float32",
        ),
        (
            {"encoder__cls_token": None, "extra": torch.zeros(1), "encoder__norm__bias": torch.zeros(3)},
            "1 missing: .*; 1 unexpected: extra; 1 with another shape: encoder.norm.bias",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_names_and_changes_nothing(
    written: Path, changes: dict[str, torch.Tensor | None], message: str
):
    model = build(**VIT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(WeightsError, match=message):
        load_weights(model, _changed(written, **changes))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_many_wrong_names_are_counted_not_listed(written: Path):
    with pytest.raises(WeightsError, match=r"unexpected: .*, and \d\d more"):
        load_weights(build(**FILTERS_14), written)


@pytest.mark.parametrize("content", [b"", b"not tensors at all", b"\xff" * 64, None])
def test_what_is_no_safetensors_file_is_refused(written: Path, content: bytes | None):
    written.write_bytes(written.read_bytes()[:-1000] if content is None else content)
    with pytest.raises(WeightsError, match=r"weights.safetensors is not a readable safetensors file"):
        load_weights(build(**VIT), written)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(WeightsError, match=r"no weights file .*nothing.safetensors"):
        build(**VIT, weights=tmp_path / "nothing.safetensors")


def test_a_weights_file_has_the_permissions_the_umask_gives(tmp_path: Path):
    """safetensors and mkstemp make files for the owner alone."""
    before = os.umask(0o027)
    try:
        save_weights(torch.nn.Linear(2, 2), tmp_path / "w.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o640
