"""Libraries with kernels for CPUs, each with a model that calls some of its operators."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from exportkit import ExportSpec
from tools.libraries.library import Library


class _MulAdd(torch.nn.Module):
    """The operators of PyTorch's tutorial on C++ extensions: two that return a tensor, one that writes into one."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.ops = getattr(torch.ops, namespace)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        product = self.ops.mymul(self.ops.mymuladd(a, b, 0.5), b)
        total = torch.empty_like(product)
        self.ops.myadd_out(product, a, total)
        return total


def extension_cpp() -> ExportSpec:
    """The plain form of pytorch/extension-cpp."""
    return _mul_add("extension_cpp")


def extension_cpp_stable() -> ExportSpec:
    """The form of pytorch/extension-cpp for the stable ABI."""
    return _mul_add("extension_cpp_stable")


def _mul_add(name: str) -> ExportSpec:
    importlib.import_module(name)
    return ExportSpec(
        model=_MulAdd(name),
        example_inputs=(torch.randn(3, 5), torch.randn(3, 5)),
        dynamic_shapes={"a": {0: "rows[1:64]"}, "b": {0: "rows"}},
    )


class _Jagged(torch.nn.Module):
    """Sums of lengths, and rows of several lengths in one padded tensor: from two of its shared libraries."""

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [4], 0.0)


def _draw_jagged(sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    lengths = torch.randint(0, 4, (sizes["batch"],), generator=generator)
    return (torch.randn(3 * sizes["batch"], 8, generator=generator), lengths), {}


def fbgemm() -> ExportSpec:
    """Rows of several lengths."""
    importlib.import_module("fbgemm_gpu")
    return ExportSpec(
        model=_Jagged(),
        example_inputs=(torch.randn(9, 8), torch.tensor([2, 0, 3])),
        dynamic_shapes={"values": {0: "3*batch[1:64]"}, "lengths": {0: "batch"}},
        draw_inputs=_draw_jagged,
    )


class _Kept(torch.nn.Module):
    """Boxes that torchvision's non-maximum suppression keeps: one of equal ones, and none of none."""

    def forward(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        keep = torch.ops.torchvision.nms(boxes, scores, 0.5)
        return boxes[keep], scores[keep]


def torchvision() -> ExportSpec:
    """Boxes that are kept."""
    importlib.import_module("torchvision")
    return ExportSpec(
        model=_Kept(),
        example_inputs=(torch.rand(8, 2).repeat(1, 2) * 10 + torch.tensor([0.0, 0.0, 5.0, 5.0]), torch.rand(8)),
        dynamic_shapes={"boxes": {0: "n[0:100]"}, "scores": {0: "n"}},
    )


def torch_harmonics() -> ExportSpec:
    """A convolution on a sphere: an operator in Python that calls one in C++."""
    harmonics = importlib.import_module("torch_harmonics")
    model = harmonics.DiscreteContinuousConvS2(4, 6, (16, 32), (16, 32), 3)
    return ExportSpec(
        model=model, example_inputs=(torch.randn(2, 4, 16, 32),), dynamic_shapes={"x": {0: "batch[1:16]"}}
    )


class _Sampled(torch.nn.Module):
    """The points that are farthest from one another."""

    def forward(self, points: Tensor) -> Tensor:
        points, _ = torch.ops.torch_quickfps.sample(points, 4, start_idx=0)
        return points


def torch_quickfps() -> ExportSpec:
    """Farthest points. Without a first one, it draws that itself."""
    importlib.import_module("torch_quickfps")
    return ExportSpec(
        model=_Sampled(), example_inputs=(torch.randn(2, 40, 3),), dynamic_shapes={"points": {0: "batch[1:8]"}}
    )


ROWS = (
    Library(
        "extension-cpp 0ec4969",
        "extension_cpp @ git+https://github.com/pytorch/extension-cpp@0ec4969",
        extension_cpp,
        "extension_cpp",
        ("cpu", "cuda"),
    ),
    Library(
        "extension-cpp a851af5",
        "extension_cpp_stable @ git+https://github.com/pytorch/extension-cpp@a851af5#subdirectory=extension_cpp_stable",
        extension_cpp_stable,
        "extension_cpp_stable",
        ("cpu", "cuda"),
    ),
    Library("fbgemm-gpu-cpu 1.8.0", "fbgemm-gpu-cpu==1.8.0", fbgemm, "fbgemm_gpu"),
    Library("torchvision 0.28.0", "torchvision==0.28.0", torchvision, "torchvision", ("cpu", "cuda")),
    Library("torch-harmonics 0.9.3", "torch-harmonics==0.9.3", torch_harmonics, "torch_harmonics"),
    Library("torch-quickfps 2.1.0", "torch-quickfps==2.1.0", torch_quickfps, "torch_quickfps"),
)
