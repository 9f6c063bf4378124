"""`swap_weights`: all of the new weights or all of the old ones, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

import exportkit
from exportkit.errors import DigestMismatchError, ModelClosedError, ModelLoadError, WeightsError
from exportkit.package.archive import PackageReader
from exportkit.runtime.weights import replaced_weights
from tests.artifacts import artifact
from tests.export.weights_models import Weighted
from tests.runtime import ways
from tests.runtime.fine_tunes import State, X, eager, save, state
from tests.runtime.threads import beside, together
from tests.subprocesses import run_python


@pytest.fixture
def model() -> Iterator[exportkit.Model]:
    with exportkit.load(artifact("weighted"), device="cpu", runners=4) as loaded:
        yield loaded


@pytest.fixture(params=ways.EVERY)
def way(request: pytest.FixtureRequest) -> ways.Open:
    return ways.opener(request)


@pytest.fixture
def every_model(way: ways.Open) -> Iterator[Any]:
    with way(artifact("weighted")) as model:
        yield model


def test_every_weight_of_every_kind_takes_effect(every_model: Any, tmp_path: Path) -> None:
    """Given by name or in a file, with one answer."""
    torch.testing.assert_close(every_model.forward(X), eager(0))
    given: list[tuple[int, State | Path]] = [(seed, state(seed)) for seed in (1, 2, 0)]
    given += [(seed, save(tmp_path / str(seed), state(seed))) for seed in (1, 2)]
    found: dict[int, torch.Tensor] = {}
    for seed, source in given:
        every_model.swap_weights(source)
        with ThreadPoolExecutor(4) as pool:  # each connection to a worker has the new ones
            answers = list(pool.map(every_model.forward, [X] * 8))
        expected = found.setdefault(seed, answers[0])
        assert all(torch.equal(answer, expected) for answer in answers)
        torch.testing.assert_close(answers[0], eager(seed))


@pytest.mark.parametrize("dropped", ["mix", "tied"])
def test_a_tied_weight_may_have_any_of_its_names(every_model: Any, dropped: str) -> None:
    new = state(1)
    del new[dropped]
    every_model.swap_weights(new)
    torch.testing.assert_close(every_model.forward(X), eager(1))


def test_the_names_are_those_of_the_state(model: exportkit.Model) -> None:
    assert set(model.weights) | {"mix", "tied"} == Weighted().state_dict().keys()
    assert len(model.weights) == len(Weighted().state_dict()) - 1


def test_what_was_given_may_change_afterwards(model: exportkit.Model, tmp_path: Path) -> None:
    new = state(1)
    file = save(tmp_path / "new.safetensors", state(1))
    for source in (new, file):
        model.swap_weights(source)
        for tensor in new.values():
            tensor.zero_()
        file.write_bytes(bytes(file.stat().st_size))
        torch.testing.assert_close(model(X), eager(1))
        save(file, state(1))


# --- what is refused --------------------------------------------------------------------------------------------------


WRONG = state(1) | {"more": torch.ones(2), "one": torch.ones(3), "counts": state(1)["counts"].int()}
WRONG["positions"] = torch.ones(16)  # a constant of the model
for name in ("few", "norm.weight", "mix", "tied"):
    del WRONG[name]
NO_FIT = [
    (
        WRONG,
        ["missing: mix or tied, few, norm.weight", "not in the model: more, positions",
         "one is float32[3], not float32[1]", "counts is int32[16], not int64[16]"],
    ),
    ({}, ["missing: "]),
    (state(1) | {"tied": state(1)["tied"] + 1}, ["mix and tied differ; they are one tensor in the model"]),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "said"), NO_FIT, ids=["other tensors", "none", "tied"])
def test_what_does_not_fit_is_named_and_nothing_changes(
    every_model: Any, tmp_path: Path, wrong: State, said: list[str]
) -> None:
    before = every_model.forward(X)
    for source in (wrong, save(tmp_path / "wrong.safetensors", wrong)):
        with pytest.raises(WeightsError) as caught:
            every_model.swap_weights(source)
        assert all(each in str(caught.value) for each in said)
        assert torch.equal(every_model.forward(X), before)


def test_what_is_no_file_of_weights_is_refused(every_model: Any, tmp_path: Path) -> None:
    before, path = every_model.forward(X), save(tmp_path / "new.safetensors", state(1))
    whole = path.read_bytes()
    huge = (10**8).to_bytes(8, "little") + whole[8:]
    for content in (b"", b"\xff" * 64, whole[:-8], whole + bytes(8), whole[:100], huge):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match="is not a safetensors file"):
            every_model.swap_weights(path)
    with pytest.raises(WeightsError, match="No such file"):
        every_model.swap_weights(tmp_path / "absent")
    with pytest.raises(WeightsError):
        every_model.swap_weights(tmp_path)
    assert torch.equal(every_model.forward(X), before)


@pytest.mark.parametrize("way", ways.PYTHON, indirect=True)
@pytest.mark.parametrize("value", [1.0, torch.empty(8, device="meta"), torch.eye(3).to_sparse()])
def test_what_is_no_tensor_with_data_is_refused(every_model: Any, value: object) -> None:
    with pytest.raises(WeightsError, match="few is not a tensor with data"):
        every_model.swap_weights({**state(1), "few": value})
    torch.testing.assert_close(every_model(X), eager(0))


def test_weights_inside_the_code_are_not_swapped() -> None:
    with exportkit.load(artifact("triton-cpu"), device="cpu") as model:
        case = model.cases[0]
        before = model(*case.args)
        assert model.weights == ()
        with pytest.raises(WeightsError, match="Quantize has no weights outside its compiled code") as caught:
            model.swap_weights({"weight": torch.zeros(40)})
        assert "--embed-weights" in str(caught.value)
        torch.testing.assert_close(model(*case.args), before, rtol=0, atol=0)


def test_a_closed_model_swaps_nothing(every_model: Any) -> None:
    every_model.close()
    with pytest.raises(ModelClosedError):
        every_model.swap_weights(state(1))


def test_a_failure_between_leaves_the_old_weights(model: exportkit.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model(X)

    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    for runner in ("NativeRunner", "ContainerRunner"):
        monkeypatch.setattr(f"exportkit.runtime.runner.{runner}.__init__", fails)
    with pytest.raises(ModelLoadError, match="no memory"):
        model.swap_weights(state(1))
    assert torch.equal(model(X), before)
    monkeypatch.undo()
    torch.testing.assert_close(model(X), before)


@pytest.mark.parametrize("way", ["here", "C"], indirect=True)
def test_a_package_that_was_written_to_meanwhile_is_noticed(way: ways.Open, tmp_path: Path) -> None:
    package = tmp_path / "copy.pt2"
    package.write_bytes(artifact("weighted").read_bytes())
    with way(package) as model:
        before = model.forward(X)
        package.touch()
        with pytest.raises(DigestMismatchError, match="was written to while it was open"):
            model.swap_weights(state(1))
        assert torch.equal(model.forward(X), before)


# --- while calls go on ------------------------------------------------------------------------------------------------


def test_every_call_has_the_old_weights_or_the_new_ones(every_model: Any, tmp_path: Path) -> None:
    """And those that have begun finish when the model is closed."""
    files = [save(tmp_path / f"{seed}.safetensors", state(seed)) for seed in (0, 1, 2)]
    answers = []
    for file in files:
        every_model.swap_weights(file)
        answers.append(every_model.forward(X))
    seen: set[int] = set()

    def call(_: int) -> None:
        with suppress(ModelClosedError):
            while True:
                answer = every_model.forward(X)
                (which,) = [index for index, known in enumerate(answers) if torch.equal(answer, known)]
                seen.add(which)

    def swap(file: Path) -> None:
        for _ in range(20):
            every_model.swap_weights(file)

    with beside(call, range(4)):
        together(swap, files[1:])
        every_model.close()
    assert {1, 2} <= seen


def test_closing_waits_for_a_swap_and_no_swap_brings_a_closed_model_back(model: exportkit.Model) -> None:
    def swap() -> None:
        for _ in range(50):
            model.swap_weights(state(1))

    with ThreadPoolExecutor(1) as pool:
        swapper = pool.submit(swap)
        model.close()
        with pytest.raises(ModelClosedError):
            swapper.result()
    with pytest.raises(ModelClosedError):
        model(X)


# Twice the weights may be there while a swap lasts; the old ones are gone afterwards.
MEMORY = """
import sys, exportkit, torch
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
model = exportkit.load(sys.argv[1])
index = torch.tensor([0, 1, 2])
weights = {"rows": torch.ones(2**19, 64)}
model.swap_weights(weights)
model(index)
before = resident()
for number in range(8):
    weights["rows"].fill_(number)
    model.swap_weights(weights)
    assert model(index).tolist() == [64.0 * number] * 3
grown = resident() - before
assert grown < 2**25, grown
"""


def test_the_memory_of_the_old_weights_is_given_back(tmp_path: Path) -> None:
    run_python(MEMORY, artifact("table"), cwd=tmp_path)


def test_a_file_s_weights_have_one_copy_which_is_the_gpu_s(tmp_path: Path) -> None:
    path = save(tmp_path / "new.safetensors", state(1))
    with PackageReader(artifact("weighted")) as reader:
        targets = reader.manifest.targets
        on_gpu = [msgspec.structs.replace(target, device="cuda") for target in targets]
        copied, mapped = (replaced_weights(reader, reader.manifest, each, path) for each in (targets, on_gpu))
        layouts = {weight.name: weight.strides for weight in reader.manifest.weights}
        replaced = {
            weight.name
            for weight in reader.manifest.weights
            if weight.state and weight.record and 0 not in weight.shape
        }
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    of_file = [range(*(int(end, 16) for end in each.split("-"))) for each in ranges]
    for name in replaced:
        assert torch.equal(mapped[name], copied[name])
        assert mapped[name].stride() == copied[name].stride() == layouts[name]
    within = {name for name in replaced if any(mapped[name].data_ptr() in each for each in of_file)}
    with safe_open(path, framework="pt") as file:
        contiguous = {name for name in replaced if file.get_tensor(name).stride() == layouts[name]}
    assert within == contiguous
    assert within < replaced
    assert not any(copied[name].data_ptr() in each for name in replaced for each in of_file)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_weights_are_copied_to_the_gpu_and_swapped_there_while_calls_go_on(tmp_path: Path) -> None:
    x = X.cuda()
    with exportkit.load(artifact("weighted-cuda"), device="cuda", runners=2) as model:
        torch.testing.assert_close(model(x).cpu(), eager(0), rtol=1e-4, atol=1e-5)
        answers = []
        on_gpu = {name: tensor.cuda() for name, tensor in state(1).items()}
        for seed, source in ((1, on_gpu), (2, save(tmp_path / "2.safetensors", state(2)))):
            model.swap_weights(source)
            answers.append(model(x))
            torch.testing.assert_close(answers[-1].cpu(), eager(seed), rtol=1e-4, atol=1e-5)
        with ThreadPoolExecutor(1) as pool:
            swapper = pool.submit(lambda: [model.swap_weights(state(seed)) for seed in (1, 2) * 10])
            while not swapper.done():
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    results = [model(x) for _ in range(20)]
                stream.synchronize()
                assert all(any(torch.equal(result, known) for known in answers) for result in results)
