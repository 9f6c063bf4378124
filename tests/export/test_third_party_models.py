"""Models as their authors leave them: wrapped, printing, with dataclasses, with tensors that are no plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from exportkit import ExportSpec
from exportkit.errors import UsageError
from exportkit.export.artifact import export_program
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Manifest, NamedTupleNode, Node
from exportkit.package.structure import unflatten


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@dataclass
class Batch:
    x: Tensor
    scale: float = 2.0
    mask: Tensor | None = None


@dataclass
class Scored:
    scores: Tensor
    batches: list[Batch]


class TakesDataclasses(torch.nn.Module):
    def forward(self, batch: Batch) -> Scored:
        assert isinstance(batch, Batch)
        return Scored(batch.x * batch.scale, [Batch(batch.x + 1, mask=batch.x > 0.5)])


def exported(model: torch.nn.Module, tmp_path: Path, *inputs: object) -> Manifest:
    return export_program(ExportSpec(model, inputs or (torch.rand(3, 4),)), tmp_path / "x.pt2")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: torch.compile(net, backend="eager"),
        torch.nn.DataParallel,
        lambda net: torch.nn.DataParallel(torch.compile(net, backend="eager")),
    ],
)
def test_the_module_inside_of_a_wrapper_is_exported(wrap, tmp_path: Path) -> None:
    net = Net()
    manifest = exported(wrap(net), tmp_path)
    assert manifest.name == "Net"
    assert [parameter.name for parameter in manifest.call.parameters] == ["x"]
    assert ExportSpec(wrap(net), ()).model is net


def test_modules_compiled_within_a_model_are_exported(tmp_path: Path) -> None:
    net = Net()
    net.linear = torch.compile(net.linear, backend="eager")
    assert exported(net, tmp_path).call.outputs[0].shape == (3, 2)


def test_dataclasses_go_in_and_come_out_with_their_fields(tmp_path: Path) -> None:
    x = torch.rand(3, 4)
    manifest = exported(TakesDataclasses(), tmp_path, Batch(x))
    assert [tensor.name for tensor in manifest.call.inputs] == ["batch.x"]
    assert [tensor.name for tensor in manifest.call.outputs] == ["scores", "batches.0.x", "batches.0.mask"]
    result: Node = manifest.call.result
    assert isinstance(result, NamedTupleNode)
    assert result.class_name == "Scored"
    with PackageReader(tmp_path / "x.pt2") as reader:
        recorded = load(reader.read(reader.manifest.cases[0].record))
    scored = unflatten(result, [recorded[f"0.output.{i}"] for i in range(3)])
    assert torch.equal(scored.scores, x * 2)
    assert torch.equal(scored.batches[0].mask, x > 0.5)
    assert scored.batches[0].scale == 2.0


@pytest.mark.parametrize(("name", "legal"), [("Ünïcode", "Unicode"), ("模型", "model"), ("_Net_", "Net")])
def test_a_class_gives_a_package_a_legal_name(name: str, legal: str, tmp_path: Path) -> None:
    assert exported(type(name, (Net,), {})(), tmp_path).name == legal


class Scaled(Tensor):
    """A weight of int8 with a scale, as torchao's are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            x, weight, bias = args
            return func(x, weight.whole * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> Scaled:
        return Scaled(inner["whole"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
        return cls(func(args[0].whole), func(args[0].scale))


class Adjacent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacent", torch.eye(4).to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.adjacent.to_dense()


class Applies(torch.nn.Module):
    """A model of one function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def scaled(x: Tensor) -> Scaled:
    return Scaled(x.to(torch.int8), x.sum())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor", "ignore:.*quantize")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (Adjacent(), torch.rand(3, 4)), r"buffer adjacent is sparse \(torch.sparse_csr\).*\n.*to_dense"),
        (lambda: (Net().to("meta"), torch.rand(3, 4)), r"parameter linear.weight is on the meta device.*\n.*to_empty"),
        (lambda: (Applies(Tensor.to_dense), torch.eye(4).to_sparse()), r"input x is sparse \(torch.sparse_coo\)"),
        (lambda: (Applies(Tensor.to_sparse), torch.rand(3, 4)), r"output 0 is sparse \(torch.sparse_coo\)"),
        (lambda: (Applies(scaled), torch.rand(3, 4)), r"output 0 is a Scaled, which wraps other tensors"),
        (
            lambda: (Applies(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)), torch.rand(3, 4)),
            r"output 0 is quantized \(torch.qint8\).*\n.*dequantize",
        ),
    ],
)
def test_tensors_that_are_no_plain_arrays_are_refused_by_name(make, message: str, tmp_path: Path) -> None:
    model, x = make()
    with pytest.raises(UsageError, match=message):
        exported(model, tmp_path, x)


def test_weights_that_wrap_other_tensors_are_exported_and_the_callers_stay(tmp_path: Path) -> None:
    net = Net().requires_grad_(False)
    whole, scale = torch.randint(-128, 128, (2, 4), dtype=torch.int8), torch.tensor(0.01)
    net.linear.weight = torch.nn.Parameter(Scaled(whole, scale), requires_grad=False)
    exported(net, tmp_path)
    assert isinstance(net.linear.weight, Scaled)
    with PackageReader(tmp_path / "x.pt2") as reader:
        assert reader.manifest.program is not None
        reader.extract(reader.manifest.program.records["forward"], tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2")
    assert torch.int8 in {tensor.dtype for tensor in program.state_dict.values()}
    x = torch.rand(3, 4)
    torch.testing.assert_close(program.module()(x), torch.nn.functional.linear(x, whole * scale, net.linear.bias))


class DynamicCache:
    """Has the name of transformers' class."""

    __module__ = "transformers.cache_utils"


def test_a_cache_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"transformers.cache_utils.DynamicCache.*\n.*use_cache=False.*own-models.md"):
        exported(Applies(lambda x: (x, DynamicCache())), tmp_path)


def test_a_trace_does_not_depend_on_the_attention_kernels_of_the_machine(tmp_path: Path) -> None:
    enabled = []

    def attend(x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            backends = torch.backends.cuda
            enabled.append((backends.mem_efficient_sdp_enabled(), backends.flash_sdp_enabled()))
        return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])

    exported(Applies(attend), tmp_path)
    assert enabled == [(False, False)]
    with PackageReader(tmp_path / "x.pt2") as reader:
        assert reader.manifest.program is not None
        reader.extract(reader.manifest.program.records["forward"], tmp_path / "program.pt2")
    graph = torch.export.load(tmp_path / "program.pt2").graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.scaled_dot_product_attention.default in called  # the compiler chooses the kernel
