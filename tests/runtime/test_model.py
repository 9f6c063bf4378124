"""A loaded package answers as the module did, and refuses what the module's export did not cover."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import exportkit
from exportkit.errors import CaseError, InputError, ManifestConsistencyError, ModelClosedError, ModelRunError
from tests.artifacts import artifact
from tests.runtime import tiny
from tests.runtime.isolation import leaves
from tests.runtime.test_swap_weights import X, eager
from tests.runtime.threads import beside

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(scope="module")
def model(tiny_package: Path, runtime: str):
    with exportkit.load(tiny_package) as model:
        yield model


@pytest.mark.parametrize(("batch", "gh"), [(1, 1), (3, 2), (4, 6)])
def test_it_answers_as_the_module_in_the_modules_structure(model, batch, gh):
    args, kwargs = tiny.example(batch, gh)
    got, expected = model(*args, **kwargs), tiny.Tiny()(*args, **kwargs)
    torch.testing.assert_close(leaves(got), leaves(expected), rtol=1e-5, atol=1e-5)
    assert type(got["regions"]).__name__ == "Regions"
    assert got["regions"]._fields == ("mean", "doubled")
    assert got["rest"][1:] == [None, "done"]
    assert list(got) == ["regions", "rest"]


def test_requests_are_answered_together(runtime):
    with exportkit.load(artifact("weighted"), device="cpu") as weighted:
        (together,) = weighted.run_requests([[X[:1]], [X[1:]]], [0]).outputs
    torch.testing.assert_close(together, eager(0))


def test_other_strides_give_the_same_answer(model):
    (image, query), kwargs = tiny.example()
    expected = model(image, query, **kwargs)
    strided = {"features": query["features"].T.contiguous().T, "mode": "scaled"}
    got = model(image.to(memory_format=torch.channels_last), strided, **kwargs)
    for one, other in zip(leaves(got), leaves(expected)):
        assert torch.equal(one, other)


def test_inputs_are_not_changed_and_outputs_carry_no_gradients(model):
    (image, query), kwargs = tiny.example()
    image.requires_grad_()
    before = image.detach().clone()
    got = model(image, query, **kwargs)
    assert torch.equal(image.detach(), before)
    assert not any(leaf.requires_grad for leaf in leaves(got))


def test_what_the_package_does_not_allow_is_refused_before_anything_runs(model):
    (image, query), kwargs = tiny.example()
    for call in (
        lambda: model(image.double(), query, **kwargs),
        lambda: model(image[:, :, :30], query, **kwargs),
        lambda: model(image, {**query, "mode": "plain"}, **kwargs),
        lambda: model(image, query),
        lambda: model(image, query, **kwargs, temperature=2.0),
        lambda: model(image.to("meta"), query, **kwargs),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert error.value.exit_code == 2
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


def test_a_closed_model_says_so(tiny_package):
    model = exportkit.load(tiny_package)
    with model:
        args, kwargs = tiny.example()
        kept = model(*args, **kwargs)
    assert leaves(kept)[0].isfinite().all()  # outputs outlive the model
    with pytest.raises(ModelClosedError, match="the model tiny was closed"):
        model(*args, **kwargs)
    with pytest.raises(ModelClosedError, match="closed"):
        model.cases[0]
    assert "closed" in repr(model)
    assert model.manifest.name == "tiny"
    model.close()  # once more does no harm


def test_closing_lets_calls_finish_that_have_begun(tiny_package):
    args, kwargs = tiny.example(4, 6)
    for _ in range(5):
        model = exportkit.load(tiny_package, runners=2)

        def work(model: exportkit.Model) -> None:
            with contextlib.suppress(ModelClosedError):
                while True:
                    assert leaves(model(*args, **kwargs))[0].shape == (4, 3)

        with beside(work, [model] * 3):
            model.close()


def test_a_failure_of_the_compiled_code_names_its_inputs(tiny_package, monkeypatch):
    class Failing:
        def run(self, inputs):
            raise RuntimeError("run_func_(...) API call failed\nand a page of C++ frames")

    model = exportkit.load(tiny_package)
    monkeypatch.setattr(model._code, "runners", {"forward": Failing()})
    args, kwargs = tiny.example()
    message = (
        r"failed on \(float32\[3, 3, 32, 8\], float32\[3, 5\], float32\[5\]\): run_func_\(...\) API call failed\n  "
    )
    with pytest.raises(ModelRunError, match=message):
        model(*args, **kwargs)


def test_a_manifest_that_is_wrong_about_the_outputs_is_found_out(tiny_files, tmp_path):
    import msgspec

    call = tiny.call()
    result = msgspec.structs.replace(call.result, keys=("regions",), items=call.result.items[:1])
    call = msgspec.structs.replace(call, result=result, outputs=call.outputs[:2])
    model = exportkit.load(tiny.write(tmp_path / "wrong.pt2", tiny_files, call=call))
    args, kwargs = tiny.example()
    with pytest.raises(ManifestConsistencyError, match="returned 3 tensors; the manifest lists 2"):
        model(*args, **kwargs)


def test_a_case_that_does_not_fit_the_call_is_refused(tiny_files, tmp_path):
    """Each way is in tests/adversarial/test_rules_state.py."""
    args, kwargs = tiny.example()
    tensors = tiny.case_tensors(args, kwargs, leaves(tiny.Tiny()(*args, **kwargs)))
    del tensors["0.output.1"]
    name = "exportkit/cases/0.safetensors"
    cases = (tiny.one_call(name, batch=3, gh=2),)
    package = tiny.write(tmp_path / "bad.pt2", tiny_files, extra={name: save(tensors)}, cases=cases)
    with exportkit.load(package) as model, pytest.raises(CaseError, match=r"has no 0.output.1 \(regions.doubled\)"):
        model.cases[0]
