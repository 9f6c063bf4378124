"""A loaded package answers as the module did, and refuses what the module's export did not cover."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import exportkit
from exportkit.errors import InputError, ManifestConsistencyError, ModelClosedError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.structure import flatten
from exportkit.runtime import isolated
from tests.runtime import tiny, ways
from tests.runtime.isolation import equal, leaves


@pytest.fixture(scope="module", params=ways.PYTHON)
def way(request: pytest.FixtureRequest) -> ways.Open:
    return ways.opener(request)


@pytest.fixture(scope="module")
def model(way: ways.Open, tiny_package: Path) -> Iterator[exportkit.Model]:
    with way(tiny_package) as model:
        yield model


@pytest.fixture(scope="module")
def here(tiny_package: Path) -> Iterator[exportkit.Model]:
    """In this process."""
    with exportkit.load(tiny_package) as model:
        yield model


@pytest.mark.parametrize(("batch", "gh"), [(1, 1), (3, 2), (4, 6)])
def test_it_answers_as_the_module_in_the_modules_structure(model, here, batch, gh):
    args, kwargs = tiny.example(batch, gh)
    before = [tensor.clone() for tensor in leaves([list(args), kwargs])]
    got, expected = model(*args, **kwargs), tiny.Tiny()(*args, **kwargs)
    torch.testing.assert_close(leaves(got), leaves(expected), rtol=1e-5, atol=1e-5)
    assert type(got["regions"]).__name__ == "Regions"
    assert got["regions"]._fields == ("mean", "doubled")
    assert got["rest"][1:] == [None, "done"]
    assert list(got) == ["regions", "rest"]
    assert equal(before, leaves([list(args), kwargs]))
    assert equal(got, here(*args, **kwargs))
    assert str(flatten(got, torch.is_tensor)[0]) == str(flatten(here(*args, **kwargs), torch.is_tensor)[0])


def test_answers_are_the_callers_own(model):
    args, kwargs = tiny.example()
    kept = model(*args, **kwargs)
    copies = [leaf.clone() for leaf in leaves(kept)]
    for _ in range(3):
        leaves(model(torch.zeros(1, 3, 16, 8), {"features": torch.zeros(1, 5), "mode": "scaled"}, **kwargs))[0].fill_(7)
    assert equal(kept, copies)
    assert not any(leaf.requires_grad or leaf.is_inference() for leaf in leaves(kept))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_whatever_autograd_does_outputs_carry_no_gradients(model, mode):
    (image, query), kwargs = tiny.example()
    expected = model(image, query, **kwargs)
    with mode():
        outputs = model(image.clone().requires_grad_(), query, **kwargs)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    assert equal(outputs, expected)
    assert not any(leaf.requires_grad for leaf in leaves(outputs))


def test_what_the_package_does_not_allow_is_refused_before_anything_runs(model, here, monkeypatch):
    (image, query), kwargs = tiny.example()
    monkeypatch.setattr(isolated.TensorSocket, "send", lambda *_: pytest.fail("something was sent"))
    for call in (
        lambda model: model(image.double(), query, **kwargs),
        lambda model: model(image[:, :, :30], query, **kwargs),
        lambda model: model(image, {**query, "mode": "plain"}, **kwargs),
        lambda model: model(image, query),
        lambda model: model(image, query, **kwargs, temperature=2.0),
        lambda model: model(image.to("meta"), query, **kwargs),
    ):
        said = []
        for each in (model, here):
            with pytest.raises(InputError) as error:
                call(each)
            assert error.value.exit_code == 2
            said.append(str(error.value))
        assert said[0] == said[1]
    monkeypatch.undo()
    assert leaves(model(image, query, **kwargs))


def test_it_has_the_modules_signature_and_says_what_it_is(model):
    assert str(inspect.signature(model)) == "(image, query, *, offset)"
    assert repr(model) == (
        "<exportkit.Model tiny 1, cpu on cpu: (image: float32[batch, 3, 16*gh, 8], query.features: float32[batch, 5], "
        "offset: float32[5])>"
    )
    assert model.device == torch.device("cpu")
    assert model.target.name == "cpu"
    assert model.manifest.name == "tiny"


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_model_cannot_be_copied_and_says_what_to_send_instead(model, how):
    """A copy would close the package a second time, which ended the process."""
    with pytest.raises(UsageError, match=r"cannot be pickled or copied.*\n.*exportkit.load in each process"):
        how(model)


def test_an_open_package_cannot_be_copied(tiny_package):
    with PackageReader(tiny_package) as reader, pytest.raises(TypeError, match="closed twice"):
        copy.deepcopy(reader.handle)


def test_the_recorded_cases_are_calls_and_answers(model):
    assert len(model.cases) == 2
    for case in model.cases:
        torch.testing.assert_close(leaves(model(*case.args, **case.kwargs)), leaves(case.outputs), rtol=1e-5, atol=1e-5)
    assert model.cases[1].sizes == {"batch": 4, "gh": 6}
    assert model.cases[-1].args[0].shape == (4, 3, 96, 8)
    assert model.cases[0].args[1]["mode"] == "scaled"
    assert model.cases[0].outputs["regions"].mean.shape == (1, 3)
    assert [case.sizes["batch"] for case in model.cases[:]] == [1, 4]
    with pytest.raises(IndexError):
        model.cases[2]


def test_a_closed_model_says_so(way, tiny_package):
    with way(tiny_package) as model:
        args, kwargs = tiny.example()
        kept = model(*args, **kwargs)
    assert leaves(kept)[0].isfinite().all()  # outputs outlive the model
    with pytest.raises(ModelClosedError, match="the model tiny was closed"):
        model(*args, **kwargs)
    with pytest.raises(ModelClosedError, match="was closed"):
        model.run_requests([leaves([list(args), kwargs])], [0])
    with pytest.raises(ModelClosedError, match="closed"):
        model.cases[0]
    assert "closed" in repr(model)
    assert model.manifest.name == "tiny"
    model.close()  # once more does no harm


def test_a_manifest_that_is_wrong_about_the_outputs_is_found_out(tiny_files, tmp_path):
    call = tiny.call()
    result = msgspec.structs.replace(call.result, keys=("regions",), items=call.result.items[:1])
    call = msgspec.structs.replace(call, result=result, outputs=call.outputs[:2])
    model = exportkit.load(tiny.write(tmp_path / "wrong.pt2", tiny_files, call=call))
    args, kwargs = tiny.example()
    with pytest.raises(ManifestConsistencyError, match="returned 3 tensors; the manifest lists 2"):
        model(*args, **kwargs)
