"""Models as their authors leave them: wrapped, with dataclasses, with tensors that are no plain arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from exportkit import ExportSpec
from exportkit.errors import UsageError
from exportkit.export.models.program_file import load_program
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import NamedTupleNode, Node
from exportkit.package.structure import unflatten
from tests.export.function_models import exported, spec_of


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


@pytest.mark.slow_but("DataParallel", "<lambda>1")
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
    manifest = exported(spec_of(wrap(net), torch.rand(3, 4)), tmp_path)
    assert manifest.name == "Net"
    assert [parameter.name for parameter in manifest.call.parameters] == ["x"]
    assert ExportSpec(wrap(net), ()).model is net


def test_dataclasses_go_in_and_come_out_with_their_fields(tmp_path: Path) -> None:
    x = torch.rand(3, 4)
    manifest = exported(spec_of(TakesDataclasses(), Batch(x)), tmp_path)
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
    assert exported(spec_of(type(name, (Net,), {})(), torch.rand(3, 4)), tmp_path).name == legal


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


def scaled(x: Tensor) -> Scaled:
    return Scaled(x.to(torch.int8), x.sum())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Tensor.to_sparse, r"output 0 is sparse \(torch.sparse_coo\)"),
        (scaled, "output 0 is a Scaled, which wraps other tensors"),
    ],
)
def test_outputs_that_are_no_plain_arrays_are_refused_by_name(
    function: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        exported(spec_of(lambda x: function(x), torch.rand(3, 4)), tmp_path)


def test_weights_that_wrap_other_tensors_are_exported_and_the_callers_stay(tmp_path: Path) -> None:
    net = Net().requires_grad_(False)
    whole, scale = torch.randint(-128, 128, (2, 4), dtype=torch.int8), torch.tensor(0.01)
    net.linear.weight = torch.nn.Parameter(Scaled(whole, scale), requires_grad=False)
    exported(spec_of(net, torch.rand(3, 4)), tmp_path)
    assert isinstance(net.linear.weight, Scaled)
    program = load_program(tmp_path / "x.pt2").programs["forward"]
    assert torch.int8 in {tensor.dtype for tensor in program.state_dict.values()}
    x = torch.rand(3, 4)
    torch.testing.assert_close(program.module()(x), torch.nn.functional.linear(x, whole * scale, net.linear.bias))


class DynamicCache:
    """Has the name of transformers' class."""

    __module__ = "transformers.cache_utils"


def test_a_cache_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"transformers.cache_utils.DynamicCache.*\n.*use_cache=False.*own-models.md"):
        exported(spec_of(lambda x: (x, DynamicCache()), torch.rand(3, 4)), tmp_path)


def test_a_trace_does_not_depend_on_the_attention_kernels_of_the_machine(tmp_path: Path) -> None:
    enabled = []

    def attend(x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            backends = torch.backends.cuda
            enabled.append((backends.mem_efficient_sdp_enabled(), backends.flash_sdp_enabled()))
        return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])

    exported(spec_of(attend, torch.rand(3, 4)), tmp_path)
    assert enabled == [(False, False)]
    graph = load_program(tmp_path / "x.pt2").programs["forward"].graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.scaled_dot_product_attention.default in called  # the compiler chooses the kernel
