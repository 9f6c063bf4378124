"""What export keeps outside of the compiled code, and what it must not leave inside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from exportkit import ExportSpec, load
from exportkit.errors import ExportError, UsageError
from exportkit.export.artifact import export_aoti
from exportkit.export.compile import program_weights
from exportkit.export.compile.program_weights import ProgramWeights
from exportkit.export.export_options import CompileOptions, TraceOptions
from exportkit.export.models.resolve import resolve
from exportkit.export.record.host_copies import elements
from exportkit.package.archive import PackageReader
from exportkit.runtime import runner
from tests.artifacts import artifact
from tests.export.function_models import FunctionModel
from tests.export.weights_models import Weighted


@pytest.fixture(scope="module")
def weighted() -> Iterator[PackageReader]:
    with PackageReader(artifact("weighted")) as reader:
        yield reader


def test_every_name_of_the_state_is_there_and_constants_are_marked(weighted: PackageReader) -> None:
    state = [weight for weight in weighted.manifest.weights if weight.state]
    assert {name for weight in state for name in (weight.name, *weight.aliases)} == Weighted().state_dict().keys()
    tied = [weight for weight in state if weight.aliases]
    assert [{weight.name, *weight.aliases} for weight in tied] == [{"mix", "tied"}]
    assert [w.name.partition("@")[0] for w in weighted.manifest.weights if not w.state] == ["positions"]


def test_records_are_the_elements_as_they_lie_in_memory(weighted: PackageReader) -> None:
    for name, tensor in Weighted().state_dict().items():
        weight = next(w for w in weighted.manifest.weights if name in (w.name, *w.aliases))
        assert (weight.dtype, weight.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        if weight.record is None:
            continue
        content = torch.frombuffer(bytearray(weighted.read(weight.record)) or bytearray(8), dtype=tensor.dtype)
        assert torch.equal(content.as_strided(weight.shape, weight.strides), tensor), name


def test_strides_are_the_models_own_and_gaps_are_closed(weighted: PackageReader) -> None:
    weights, model = {weight.name: weight for weight in weighted.manifest.weights}, Weighted()
    assert weights["turned"].strides == model.turned.stride() == (1, 8)
    assert weights["conv.weight"].strides == model.conv.weight.stride() == (4, 1, 4, 4)
    assert model.gaps.stride() == (2,)
    assert weights["gaps"].strides == (1,)


def test_both_targets_take_every_weight_that_is_read_from_outside(weighted: PackageReader) -> None:
    manifest = weighted.manifest
    read = {weight.name for weight in manifest.weights if weight.record}
    unread = {"unused.weight", "unused.bias", "norm.num_batches_tracked"}
    assert {weight.name for weight in manifest.weights if not weight.record} == unread
    # Those of up to eight elements too, which Inductor would have written into the code.
    assert {"few", "temperature", "one", "corner", "flag", "conv.bias", "nothing"} < read
    assert len(manifest.targets) == 2
    for target in manifest.targets:
        assert set(target.constants["forward"].values()) == read


def test_weights_take_their_room_once(weighted: PackageReader) -> None:
    sizes = {record.name: record.size for record in weighted.manifest.records}
    code = [size for name, size in sizes.items() if name.endswith(".so")]
    with PackageReader(artifact("table")) as table:
        large = {record.name: record.size for record in table.manifest.records}
    assert len(code) == 2
    assert max(large.values()) == 2**27
    assert sum(large.values()) < 2**27 + 2**20


def test_embedded_weights_are_in_the_code_and_nowhere_else() -> None:
    with PackageReader(artifact("triton-cpu")) as reader:
        assert reader.manifest.weights == ()
        assert [target.constants for target in reader.manifest.targets] == [{"forward": {}}]
        assert not any(name.startswith("data/weights/") for name in reader.names)


# --- without a compiler -----------------------------------------------------------------------------------------------


def program_of(model: torch.nn.Module, *args: torch.Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model.eval(), args)


class Codebook(torch.nn.Module):
    """Uses a tensor twice that is computed from buffers, beside a product whose weight is turned at load."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("total", torch.rand(16, 16) + 1)
        self._table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._table is None:
            self._table = self.total / self.total.sum(1)[:, None]
        distances = torch.cdist(self.linear(x)[None], self._table[None])[0]
        return functional.embedding(distances.argmin(-1), self._table), distances


@pytest.mark.slow
def test_a_constant_that_is_used_twice_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Codebook(), torch.rand(3, 16)
    export_aoti(ExportSpec(model, (x,)), tmp_path / "x.pt2", TraceOptions(cases=0, edge_cases=False))
    for runtime in ("cpp", "python"):
        monkeypatch.setenv("EXPORTKIT_RUNTIME", runtime)
        with load(tmp_path / "x.pt2", device="cpu") as loaded:
            torch.testing.assert_close(loaded(x), model(x))


def test_tensors_of_one_name_in_branches_get_names_of_their_own() -> None:
    graph = SimpleNamespace(constants={}, allocated_constant_name={})

    def allocate(graph: Any, name: str, data: torch.Tensor) -> str:  # as Inductor does
        new = name if name not in graph.constants else f"{name}_{len(graph.constants)}"
        graph.constants[new], graph.allocated_constant_name[new] = data, name
        return new

    one, other = torch.zeros(3), torch.zeros(3)
    named = [program_weights._one_name_for_one_tensor(allocate, graph, "table", each) for each in (one, other, one)]
    assert named == ["table", "table_1", "table"]
    assert graph.allocated_constant_name == {"table": "table", "table_1": "table_1"}


def test_code_with_two_constants_of_one_name_is_refused() -> None:
    container = SimpleNamespace(get_constant_names_to_original_fqns=lambda: {"table": "table", "table_0": "table"})
    with pytest.raises(RuntimeError, match="several constants of one name"):
        runner._lend_constants(container, {"table": torch.zeros(3)})


def test_the_programs_memory_is_what_is_written() -> None:
    program = program_of(torch.nn.Linear(300, 400), torch.randn(2, 300))
    weights = ProgramWeights([program])
    addresses = {np.frombuffer(content, dtype=np.uint8).ctypes.data for content in weights.records.values()}
    assert addresses == {tensor.data_ptr() for tensor in program.state_dict.values()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_elements_are_the_bytes_of_a_tensor_of_any_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    content = torch.randint(0, 2, (12 * dtype.itemsize,), dtype=torch.uint8)[: int(np.prod(shape)) * dtype.itemsize]
    assert bytes(elements(content.view(dtype).reshape(shape))) == bytes(content.tolist())


def test_a_constant_that_a_loader_cannot_set_is_refused() -> None:
    program = program_of(torch.nn.Linear(3, 4), torch.randn(2, 3))
    with pytest.raises(ExportError, match="code for cuda takes the tensor c on cpu") as caught:
        ProgramWeights([program]).take({"c": torch.ones(3)}, torch.device("cuda"))
    assert "--embed-weights" in str(caught.value)


def test_a_weight_that_the_compiler_laid_out_anew_is_refused() -> None:
    program = program_of(torch.nn.Linear(3, 4), torch.randn(2, 3))
    turned = program.state_dict["weight"].detach().t().contiguous().t()
    with pytest.raises(ExportError, match="changed the layout of the weight weight"):
        ProgramWeights([program]).take({"weight": turned}, torch.device("cpu"))


def test_a_weight_that_the_code_does_not_take_is_kept_to_be_compared() -> None:
    program = program_of(torch.nn.Linear(3, 4), torch.randn(2, 3))
    weights = ProgramWeights([program])
    assert weights.take({"weight": program.state_dict["weight"]}, torch.device("cpu")) == {"weight": "weight"}
    assert all(weight.record for weight in weights.weights)


def test_a_weight_whose_result_is_dropped_is_kept_nowhere_and_may_differ() -> None:
    model = FunctionModel(lambda x: (model.dropped(x), model.used(x))[1])
    model.used, model.dropped = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    weights = ProgramWeights([program_of(model, torch.rand(2, 4))]).weights
    assert {weight.name for weight in weights if weight.record is None} == {"dropped.weight", "dropped.bias"}


def test_weights_that_a_package_cannot_hold_are_named() -> None:
    model = FunctionModel(lambda x: x + 1)
    model.mask = torch.nn.Buffer(torch.eye(3).to_sparse())
    program = program_of(model, torch.randn(3))
    with pytest.raises(ExportError, match=r"cannot hold mask: float32 with the layout torch\.sparse_coo"):
        ProgramWeights([program])


@pytest.mark.cuda
def test_several_cpu_instruction_sets_are_for_the_cpu(tmp_path: Path) -> None:
    isas = ["x86-64-v3", "x86-64-v4"]
    resolved = resolve("tests/export/weights_models.py:weighted")
    with pytest.raises(UsageError, match="x86-64-v3 and x86-64-v4 were given for device cuda"):
        export_aoti(resolved, tmp_path / "x.pt2", TraceOptions(device="cuda"), CompileOptions(cpu_isas=isas))
