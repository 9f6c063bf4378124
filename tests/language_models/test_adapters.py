"""A session takes PEFT's adapters, one for each row, and answers as PEFT does. What does not fit is refused."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import exportkit
from exportkit.errors import StateError, UsageError
from exportkit.packaging import build_package
from exportkit.runtime.native import library_path
from exportkit.serve.protocol.inference import SequenceStep
from exportkit.serve.statuses import BadRequestError
from exportkit.transformers import Lora, spec
from tests.artifacts import artifact
from tests.language_models.adapter_models import PROMPT, RANK, TARGETS, VOCABULARY, llama, peft_model
from tests.runtime import c_interface
from tests.runtime.c_interface import view
from tests.serve.engine import asking

peft = pytest.importorskip("peft")

FILE = "adapter_model.safetensors"
# A smaller rank, and the whole one whose scale is another for some modules.
CONFIGS: dict[str, dict[str, Any]] = {
    "small": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rooted": {
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "down_proj"],
        "use_rslora": True,
        "alpha_pattern": {"down_proj": 3},
    },
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "a.pt2"
    build_package([artifact("adapters")], path, name="a")
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of adapters, and PEFT's models by their name."""
    folder = tmp_path_factory.mktemp("peft")
    return folder, {name: peft_model(folder / name, i, **config) for i, (name, config) in enumerate(CONFIGS.items())}


class Talk:
    """Prompts of two lengths and two tokens more, and what models answer to them after each call."""

    lengths = torch.tensor([PROMPT, 3])
    tokens = torch.randint(0, VOCABULARY, (2, PROMPT + 2), generator=torch.Generator().manual_seed(1))

    @property
    def text(self) -> Tensor:
        return self.tokens[:, :PROMPT].contiguous()

    def next(self, step: int) -> Tensor:
        return self.tokens.gather(1, (self.lengths + step)[:, None])

    def wanted(self, *models: Any) -> list[Tensor]:
        """The logits of each row by its model."""
        with torch.no_grad():
            return [
                torch.stack(
                    [
                        model(input_ids=row[None, : int(length) + step]).logits[0, -1]
                        for model, row, length in zip(models, self.tokens, self.lengths)
                    ]
                )
                for step in range(3)
            ]


TALK = Talk()


class InC:
    """A session of the C interface, called as one of Python."""

    def __init__(self, session: c_interface.Session) -> None:
        self._session = session
        self.reset = session.reset

    def load_state(self, path: Path, *, partial: bool, row: int | None = None) -> tuple[str, ...]:
        assert partial
        return self._session.load_partial_state(path, row)

    def _run(self, method: str, *tensors: Tensor) -> Tensor:
        (answer,) = self._session.run(method, *(view(np.ascontiguousarray(tensor.numpy())) for tensor in tensors))
        return torch.from_dlpack(answer).clone()

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self._run("prefill", tokens, lengths)

    def decode(self, token: Tensor) -> Tensor:
        return self._run("decode", token)


@pytest.fixture(params=["python", "isolated", "c"])
def session(request: pytest.FixtureRequest, package: Path) -> Iterator[Any]:
    """A session of two rows, by each door."""
    if request.param == "c":
        library = c_interface.Library(library_path())
        with library.open(package) as model:
            yield InC(model.session(batch=2))
        return
    with exportkit.load(package, isolate=request.param == "isolated") as model, model.session(batch=2) as session:
        yield session


def agrees(session: Any, wanted: list[Tensor]) -> None:
    answers = [session.prefill(TALK.text, TALK.lengths), *(session.decode(TALK.next(step)) for step in range(2))]
    for answer, expected in zip(answers, wanted, strict=True):
        torch.testing.assert_close(answer, expected, atol=2e-6, rtol=2e-6)


def test_two_adapters_answer_as_peft_in_one_batch_and_in_turns(session, saved):
    folder, models = saved
    small, rooted = (folder / name / FILE for name in CONFIGS)
    apart = (TALK.wanted(*2 * [models[name]])[0] for name in CONFIGS)
    assert all(float((each - TALK.wanted(llama(), llama())[0]).abs().max()) > 1e-2 for each in apart)
    agrees(session, TALK.wanted(llama(), llama()))  # without adapters, it is the model
    session.reset()
    assert len(session.load_state(small, partial=True, row=0)) == 2 * 2 * len(TARGETS)
    session.load_state(rooted, partial=True, row=1)
    agrees(session, TALK.wanted(models["small"], models["rooted"]))
    session.reset()
    session.load_state(rooted, partial=True)
    session.load_state(small, partial=True)  # nothing of the one before is left: it has other modules
    agrees(session, TALK.wanted(models["small"], models["small"]))


def test_adapters_as_tensors_are_those_of_a_file(package, saved):
    """`adapt` takes what `load_state` reads: padded, and scaled."""
    folder, models = saved
    with exportkit.load(package) as model, model.session(batch=2) as loaded, model.session(batch=2) as given:
        loaded.load_state(folder / "small" / FILE, partial=True)
        own = {name.removeprefix("adapters."): each.clone() for name, each in loaded.state.items() if "lora_" in name}
        assert torch.equal(given.adapt(own), torch.zeros(2, dtype=torch.int64))
        agrees(given, TALK.wanted(models["small"], models["small"]))


def test_a_saved_session_brings_its_adapters_and_is_a_part_of_the_state_too(package, saved, tmp_path):
    folder, models = saved
    whole, part = tmp_path / "whole.safetensors", tmp_path / "part.safetensors"
    with exportkit.load(package) as model, model.session(batch=2) as session, model.session(batch=2) as other:
        session.load_state(folder / "rooted" / FILE, partial=True)
        session.save(whole)
        metadata = {"exportkit.model": model.manifest.name}
        save_file({name: each for name, each in load_file(whole).items() if "lora_" in name}, part, metadata)
        names = other.load_state(part, partial=True)
        assert sorted(names) == sorted(name for name in session.state if "lora_" in name)
        agrees(other, TALK.wanted(models["rooted"], models["rooted"]))
    with pytest.raises(StateError, match=r"all of which has rows(?s:.*)load_state"):  # there is nothing to begin with
        build_package([package], tmp_path / "new.pt2", weights=whole)


def copied(folder: Path, target: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], Any]) -> Path:
    """An adapter with other tensors or another configuration."""
    shutil.copytree(folder, target)
    tensors, config = load_file(target / FILE), json.loads((target / "adapter_config.json").read_text())
    change(tensors, config)
    save_file(tensors, target / FILE)
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target / FILE


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def renamed(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors.pop(FIRST)


def twice(tensors: dict[str, Tensor]) -> None:
    for name in (FIRST, FIRST.replace("lora_A", "lora_B")):
        tensors[name.removeprefix("base_model.model.")] = tensors[name].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: renamed(t, FIRST.replace("q_proj", "o_proj")), "lora_A and lora_B of one rank for"),
        (lambda t, c: t.pop(FIRST), "lora_A and lora_B of one rank for"),
        (lambda t, c: t.update({"model.norm.weight": torch.ones(32)}), "norm.weight.*not in the state of a"),
        (lambda t, c: t.update({"keys": torch.ones(32)}), "keys.*can be cache.0.keys or cache.1.keys"),
        (lambda t, c: t.update({"position": torch.ones(2)}), r"position is float32\[2\]; the session's is int64\[2\]"),
        (lambda t, c: t.update({"position": torch.ones(3, dtype=torch.int64)}), r"is int64\[3\]; .* int64\[2\]"),
        (lambda t, c: twice(t), "two tensors for adapters.model.layers.0.self_attn.q_proj.lora_"),
        (lambda t, c: [t.update({n: torch.cat([x, x], d)}) for n, x, d in wider(t)], "session's is(?s:.*)smaller rank"),
        (lambda t, c: t.update({n: x.int() for n, x in t.items()}), "is int32"),
        (lambda t, c: c.update(peft_type="IA3"), "has '\"IA3\"' as 'peft_type', which is not plain LoRA"),
        (lambda t, c: c.update(use_dora=True), "has 'true' as 'use_dora'"),
        (lambda t, c: c.update(init_lora_weights="pissa"), "pissa.*init_lora_weights"),
        (lambda t, c: c.update(of_next_year={"a": 1}), "of_next_year"),
        (lambda t, c: c.update(alpha_pattern={"model.*q_proj": 3}), "regular expression"),
        (lambda t, c: c.update(lora_alpha="8"), "adapter_config.json: .*lora_alpha"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(package, saved, tmp_path, change, message):
    file = copied(saved[0] / "rooted", tmp_path / "changed", change)
    with exportkit.load(package) as model, model.session(batch=2) as session:
        with pytest.raises(StateError, match=message):
            session.load_state(file, partial=True)
        assert not any(each.any() for each in session.state.values())


def wider(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor, int]]:
    """Adapters of twice the rank that was exported."""
    return [(name, tensor, int("lora_B" in name)) for name, tensor in list(tensors.items())]


def test_an_adapter_without_its_configuration_has_no_scale(package, saved, tmp_path):
    file = tmp_path / FILE
    shutil.copy(saved[0] / "small" / FILE, file)
    with exportkit.load(package) as model, model.session(batch=2) as session:
        with pytest.raises(StateError, match=r"no adapter_config\.json lies beside it"):
            session.load_state(file, partial=True)
        with pytest.raises(StateError, match=r"does not say which model's state(?s:.*)partial=True"):
            session.load_state(file)
        for row in (-1, 2):
            with pytest.raises(UsageError, match=f"row must be from 0 to 1, got {row}"):
                session.load_state(saved[0] / "small" / FILE, partial=True, row=row)
        with pytest.raises(UsageError, match="without partial=True"):
            session.load_state(file, row=0)


def adapted_inside() -> Any:
    return peft.get_peft_model(llama(), peft.LoraConfig(task_type="CAUSAL_LM")).eval()


@pytest.mark.parametrize(
    ("make", "lora", "message"),
    [
        (llama, Lora(rank=0), "the rank is 0"),
        (llama, Lora(rank=30_000), "take .* bytes for 2 rows(?s:.*)smaller rank"),
        (llama, Lora(target_modules=("embed_tokens",)), "no linear layer of LlamaForCausalLM(?s:.*)q_proj"),
        (adapted_inside, Lora(), "has adapters of PEFT's in it already(?s:.*)unload"),
    ],
)
def test_adapters_that_a_model_cannot_have_are_refused(make, lora, message):
    with pytest.raises(UsageError, match=message):
        spec(make(), cache_length=16, prompt=8, adapters=lora)


def test_the_model_inside_of_pefts_is_exported_with_its_adapters():
    model = adapted_inside()
    assert spec(model, cache_length=8, prompt=4, batch=1).model.model is model.get_base_model()
    learned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UsageError, match=r"puts learned tokens before the prompt(?s:.*)exportkit\.ExportSpec"):
        spec(peft.get_peft_model(llama(), learned).eval(), cache_length=8, prompt=4)


def begun(package: Path, folder: Path | None, names: Sequence[str | None]) -> list[Tensor | BaseException]:
    """What sequences answer that begin at the same time with these adapters."""

    async def serve() -> list[Tensor | BaseException]:
        async with asking.serving(package, adapters=folder, batch=asking.GATHERING) as repository:
            model = repository.model("a.prefill")
            inputs = {"tokens": TALK.text[:1], "lengths": TALK.lengths[:1]}
            steps = [SequenceStep(number, start=True, adapter=name) for number, name in enumerate(names, 1)]
            asked = (model.infer(asking.request(inputs, sequence=step)) for step in steps)
            found = await asyncio.gather(*asked, return_exceptions=True)
            return [each if isinstance(each, BaseException) else asking.tensors(each)["0"] for each in found]

    return asyncio.run(serve())


def test_sequences_begin_with_an_adapter_of_the_servers_folder(package, saved):
    """Steps of sequences with different adapters run in one batch."""
    folder, models = saved
    answers = begun(package, folder, ["small", "rooted", None])
    for answer, model in zip(answers, (models["small"], models["rooted"], llama()), strict=True):
        torch.testing.assert_close(answer[0], TALK.wanted(model)[0][0], atol=2e-6, rtol=2e-6)


def test_a_server_says_which_adapter_it_does_not_have(package, saved, tmp_path):
    copied(saved[0] / "small", tmp_path / "broken", lambda tensors, config: config.update(use_dora=True))
    outside = ["other", "", ".", "..", "broken/../broken", "a\0b", 300 * "x", str(saved[0] / "small")]
    *missing, unfit, answered = begun(package, tmp_path, [*outside, "broken", None])
    assert all("there is no adapter" in str(each) for each in missing)
    assert isinstance(unfit, BadRequestError)
    assert re.search("the adapter broken does not fit: adapter_config.json has 'true' as 'use_dora'", unfit.text)
    assert isinstance(answered, Tensor)
    (refused,) = begun(package, None, ["small"])
    assert isinstance(refused, BadRequestError)
    assert "--adapters" in refused.text
