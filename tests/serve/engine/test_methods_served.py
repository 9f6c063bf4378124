"""Of several methods, those without state are served, each as a model; the others are refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import torch

from exportkit.errors import UsageError
from exportkit.package import manifest as m
from exportkit.serve.engine.servable import servable
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.statuses import BadRequestError, NotReadyError, NotServedError
from tests.package import samples, stateful_samples
from tests.runtime import stateful, tiny
from tests.serve.engine.asking import GATHERING, only, request, serving, tensors, until

NONE = SequenceLimits(most=0)


def rows(count: int = 2) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, stateful.WIDTH)}


@pytest.mark.parametrize("isolate", [False, True])
async def test_a_method_without_state_answers_under_its_name(recorder_package, isolate):
    async with serving(recorder_package, isolate=isolate, batch=GATHERING, sequences=NONE) as repository:
        model = only(repository)
        asked = [rows(), rows(), rows(3)]
        answers = await asyncio.gather(*(model.infer(request(each)) for each in asked))
        for inputs, answer in zip(asked, answers):
            assert (answer.model, answer.version) == ("recorder.embed", "1")
            torch.testing.assert_close(tensors(answer)["0"], torch.tanh(inputs["x"]) * 2)
        metadata, names = model.metadata(), [entry.name for entry in repository.index()]
    assert names == ["recorder.embed"]
    vectors = [-1, stateful.WIDTH]
    assert metadata["methods"]["embed"] == {
        "served_as": "recorder.embed",
        "reason": None,
        "inputs": [{"name": "x", "datatype": "FP32", "shape": vectors}],
        "outputs": [{"name": "0", "datatype": "FP32", "shape": vectors}],
        "sequences": False,
    }
    assert metadata["methods"]["peek"]["reason"] == "has state (cache), which belongs to a session"
    assert set(metadata["methods"]["fill"]) == {"served_as", "reason"}
    assert metadata["methods"]["fill"]["served_as"] is None


async def test_a_limit_of_bytes_that_no_sequence_meets_is_warned_of(recorder_package):
    lines: list[str] = []
    async with serving(recorder_package, sequences=SequenceLimits(most_bytes=1), report=lines.append):
        warnings = [line for line in lines if line.startswith("warning: ")]
    assert warnings[0].startswith("warning: --max-sequence-bytes 1 refuses every sequence of recorder.")


async def test_what_is_not_served_is_refused_by_its_name_and_says_why(recorder_package):
    lines: list[str] = []
    async with serving(recorder_package, sequences=NONE, report=lines.append) as repository:
        served, *others = lines
        assert served == f"model recorder.embed, version 1, on cpu, from {recorder_package}"
        said = dict(line.removeprefix("not served: ").split(", which ", 1) for line in others)
        assert said["recorder.push"] == "has state (cache, position, gain), which belongs to a session"
        assert "writes into its input out" in said["recorder.fill"]
        assert set(said) == {"recorder.push", "recorder.peek", "recorder.fill"}
        with pytest.raises(NotServedError, match=r"the method `push` of recorder is not served: it has state") as push:
            repository.model("recorder.push")
        assert "the names recorder.embed" in push.value.hint
        with pytest.raises(NotServedError, match="no default method"):
            repository.model("recorder")
        with pytest.raises(NotServedError, match=r"no model is named recorder\.none"):
            repository.model("recorder.none")


@pytest.fixture(scope="module")
def with_default(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same code: `forward` is what embed was."""
    with pytest.MonkeyPatch.context() as patch:
        methods = {"forward" if name == "embed" else name: each for name, each in stateful.METHODS.items()}
        patch.setattr(stateful, "METHODS", methods)
        return stateful.write(tmp_path_factory.mktemp("default") / "notes.pt2", name="notes")


async def test_the_packages_name_stands_for_the_method_that_a_request_names(recorder_package, with_default):
    async with serving(recorder_package, with_default) as repository:
        for package, default in (("recorder", "embed"), ("notes", None)):
            asked = repository.named(package)
            first = await asked.infer(request(rows(), method=default))
            assert first.model == (f"{package}.embed" if default else package)
            for name in (package, f"{package}.push"):
                begin = SequenceStep(f"of {name}", start=True)
                pushed = await repository.named(name).infer(request(rows(), sequence=begin, method="push"))
                assert pushed.model == f"{package}.push"
            step = SequenceStep(f"of {package}", end=True)
            scale = {"scale": torch.ones(2, 1)}
            assert (await asked.infer(request(scale, sequence=step, method="peek"))).model == f"{package}.peek"
            assert repository.model(package, "1", "push") is repository.model(f"{package}.push")
            assert asked.ready
            assert set(asked.body_rules.methods) == {"push", "peek", default or "forward"}
        assert repository.named("notes").metadata()["inputs"][0]["name"] == "x"
        assert repository.model("notes.push").body_rules.methods == {}
        assert repository.model("notes") is repository.model("notes", method="forward")
        metadata, config = repository.named("recorder").metadata(), repository.model("notes").config()
    assert (metadata["name"], metadata["versions"], metadata["inputs"]) == ("recorder", ["1"], [])
    assert metadata["methods"]["push"]["inputs"][0]["name"] == "x"
    assert metadata["methods"]["push"]["sequences"]
    assert set(json.loads(config["parameters"]["methods"]["string_value"])) == {"push", "peek", "forward", "fill"}


async def test_a_method_that_is_not_there_or_another_than_the_name_says_is_refused(recorder_package, with_default):
    async with serving(recorder_package, with_default) as repository:
        for name, method, kind, words in [
            ("notes", "none", NotServedError, "the method `none` of notes is not served"),
            ("notes", "fill", NotServedError, "fill` of notes is not served: it writes into its input out"),
            ("notes", "embed", NotServedError, "the method `embed` of notes"),
            ("notes.push", "peek", BadRequestError, "for notes.push, and its parameter `method` says `peek`"),
            ("notes.push", "forward", BadRequestError, "says `forward`"),
            ("notes.push", "notes.push", NotServedError, "the method `notes.push` of notes is not served"),
            ("recorder", None, NotServedError, "recorder has no default method that is served"),
            ("recorder", "forward", NotServedError, "the method `forward` of recorder is not served"),
        ]:
            with pytest.raises(kind, match=re.escape(words)) as refused:
                await repository.named(name).infer(request(rows(), method=method))
            with pytest.raises(kind, match=re.escape(words)):
                repository.model(name, method=method)
            assert refused.value.hint
        with pytest.raises(NotServedError, match="no default method"):
            repository.named("recorder").config()


async def test_a_package_that_gets_a_default_method_answers_by_its_name(with_default, tmp_path):
    stateful.write(tmp_path / "notes.pt2", name="notes")
    async with serving(repository=tmp_path) as repository:
        before = repository.named("notes")
        assert before.name == "notes"
        assert not isinstance(before, ServedModel)
        (tmp_path / "new").write_bytes(with_default.read_bytes())
        (tmp_path / "new").replace(tmp_path / "notes.pt2")
        await repository.load("notes", {})
        assert isinstance(repository.named("notes"), ServedModel)
        await until(lambda: before.closed)
        begin = SequenceStep(1, start=True, end=True)
        late = await before.infer(request(rows(), sequence=begin, method="push"))  # it was admitted before
        assert late.model == "notes.push"
        await repository.unload("notes")
        with pytest.raises(NotReadyError):
            repository.named("notes")


async def test_a_package_is_loaded_and_unloaded_as_a_whole(recorder_package, tmp_path):
    (tmp_path / "recorder.pt2").write_bytes(recorder_package.read_bytes())
    async with serving(repository=tmp_path, sequences=NONE) as repository:
        before = only(repository)
        for change in (repository.load("recorder.embed", {}), repository.unload("recorder.embed")):
            with pytest.raises(BadRequestError, match="loaded and unloaded as a whole"):
                await change
        await repository.unload("recorder")
        assert not repository.models()
        assert [(entry.name, entry.state) for entry in repository.index()] == [("recorder", "UNAVAILABLE")]
        await repository.load("recorder", {})
        assert only(repository) is not before
        assert only(repository).counted is before.counted


def test_the_default_method_has_the_packages_name():
    offered = servable("toy", stateful_samples.manifest(), sequences=False)
    assert offered.names == {"forward": "toy"}
    assert set(offered.left_out) == {"decode"}
    whole = servable("toy", stateful_samples.manifest(), sequences=True)
    assert whole.left_out["decode"].startswith("writes into its input")
    alone = samples.manifest(methods=(m.PackagedMethod(name="score", call=samples.manifest().call, state=()),))
    assert servable("toy", alone, sequences=False).names == {"score": "toy"}


async def test_two_packages_with_the_same_name_for_a_method_are_refused(recorder_package, tiny_files, tmp_path):
    other = tiny.write(tmp_path / "other.pt2", tiny_files, name="recorder.embed")
    with pytest.raises(UsageError, match=r"would be served as recorder\.embed"):
        await serving(recorder_package, other).__aenter__()
