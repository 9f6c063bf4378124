"""Compiled code writes its state where it is: torch's own runner, without a runtime of ours, gives eager's answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from exportkit.export.models.program_model import state_of
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Size, code_folder
from exportkit.runtime.refused_values import RefusedValues
from exportkit.runtime.runner import COMPUTED
from exportkit.runtime.weights import constants_of, mapped_weights
from tests.artifacts import artifact


@pytest.fixture(scope="module")
def reader() -> Iterator[PackageReader]:
    with PackageReader(artifact("writer")) as opened:
        yield opened


class Code:
    """The compiled code of each method."""

    def __init__(self, reader: PackageReader, folder: Path) -> None:
        self._runners = {}
        (target,) = reader.manifest.targets
        for method in reader.manifest.methods:
            prefix = f"data/aotinductor/{code_folder(target.name, method.name)}/"
            own = folder / method.name
            own.mkdir()
            for name in [name for name in reader.names if name.startswith(prefix)]:
                reader.extract(name, own / name.removeprefix(prefix))
            (library,) = own.glob("*.so")
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
            found = constants_of(target, method.name, mapped_weights(reader))
            known = runner.get_constant_names_to_original_fqns()
            names = {inner: name for inner, name in known.items() if not inner.startswith(COMPUTED)}
            if names:
                given = {inner: found[name].clone() for inner, name in names.items()}
                runner.update_constant_buffer(given, False, True, True)
            self._runners[method.name] = RefusedValues(library, torch.device("cpu")).wrapped(runner.run)

    def run(self, method: str, tensors: list[Tensor]) -> list[Tensor]:
        return self._runners[method](tensors)


def test_recorded_sessions_give_eagers_answers_and_leave_eagers_state(reader: PackageReader, tmp_path: Path) -> None:
    code, manifest = Code(reader, tmp_path), reader.manifest
    initial = state_of(manifest, reader.read)
    for case in manifest.cases:
        tensors = load(reader.read(case.record))
        sizes = {name: size for call in case.calls for name, size in call.sizes.items()}
        state = [_at(initial[each.name], each.shape, sizes) for each in manifest.state]
        answers: list[tuple[Tensor, Tensor]] = []
        for number, call in enumerate(case.calls):
            method = manifest.method(call.method)
            inputs = [tensors[f"{number}.input.{i}"] for i in range(len(method.call.inputs))]
            before = [tensor.clone() for tensor in inputs]
            outputs = code.run(call.method, [*inputs, *(state[use.index] for use in method.state)])
            assert len(outputs) == len(method.call.outputs)
            for i, output in enumerate(outputs):
                torch.testing.assert_close(output, tensors[f"{number}.output.{i}"])
            for i, described in enumerate(method.call.inputs):
                after = tensors[f"{number}.written.{i}"] if described.written else before[i]
                torch.testing.assert_close(inputs[i], after)
            answers += [(output, output.clone()) for output in outputs]
        assert all(torch.equal(output, copy) for output, copy in answers), "a later call changed an answer"
        for j, tensor in enumerate(state):
            if f"state.{j}" in tensors:
                torch.testing.assert_close(tensor, tensors[f"state.{j}"])


def test_methods_and_targets_share_one_record_of_each_weight(reader: PackageReader) -> None:
    manifest = reader.manifest
    (target,) = manifest.targets
    assert {name: set(constants.values()) for name, constants in target.constants.items()} == {
        "prefill": {"embedding.weight", "qkv.weight", "qkv.bias", "slots"},
        "write": {"embedding.weight"},
        "decode": {"embedding.weight", "qkv.weight", "qkv.bias", "slots"},
    }
    assert [w.aliases for w in manifest.weights if w.name == "embedding.weight"] == [("head.weight",)]
    names = {weight.name for weight in manifest.weights}
    assert not names & {"position", "cache.k", "cache.v", "assigned.old", "assigned.new"}
    assert len([name for name in reader.names if name.startswith("data/weights/")]) == len(names)


def _at(tensor: Tensor, shape: tuple[int | Size, ...], sizes: dict[str, int]) -> Tensor:
    wanted = [size.at(sizes) if isinstance(size, Size) and size.dimension in sizes else -1 for size in shape]
    return tensor.expand(wanted).clone()
