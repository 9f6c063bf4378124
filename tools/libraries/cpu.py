"""Libraries with kernels for CPUs, each with a model that calls some of its operators."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from exportkit import ExportSpec
from tools.libraries import data_kernels as data
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


class _Segments(torch.nn.Module):
    """Sums over rows that are found by where they begin."""

    def forward(self, x: Tensor, begins: Tensor) -> Tensor:
        return torch.ops.torch_scatter.segment_sum_csr(x, begins, None)


def torch_scatter() -> ExportSpec:
    """Sums of rows. Its one kernel for all devices reads memory, and it has no fake kernels."""
    importlib.import_module("torch_scatter")

    @_fake(torch.ops.torch_scatter.segment_sum_csr.default)
    def _(x: Tensor, begins: Tensor, out: Tensor | None) -> Tensor:
        return x.new_empty(begins.shape[0] - 1, *x.shape[1:])

    return ExportSpec(
        model=_Segments(),
        example_inputs=_draw_segments({"n": 9, "p": 4}, torch.Generator())[0],
        dynamic_shapes={"x": {0: "n[2:100]"}, "begins": {0: "p+1[1:50]"}},
        draw_inputs=_draw_segments,
    )


def _draw_segments(sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    n, inner = sizes["n"], torch.randint(0, sizes["n"] + 1, (sizes["p"] - 1,), generator=generator).sort().values
    return (torch.randn(n, 8, generator=generator), torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), n)])), {}


class _Product(torch.nn.Module):
    """The product of a sparse matrix in compressed rows and a dense one."""

    def forward(self, x: Tensor, begins: Tensor, columns: Tensor) -> Tensor:
        return torch.ops.torch_sparse.spmm_sum(None, begins, columns, None, None, None, x)


def torch_sparse() -> ExportSpec:
    """A product, like torch_scatter."""
    importlib.import_module("torch_sparse")

    @_fake(torch.ops.torch_sparse.spmm_sum.default)
    def _(row: Tensor | None, begins: Tensor, columns: Tensor, *others: Tensor) -> Tensor:
        return others[-1].new_empty(begins.shape[0] - 1, *others[-1].shape[1:])

    return ExportSpec(
        model=_Product(),
        example_inputs=_draw_product({"n": 9, "p": 4}, torch.Generator())[0],
        dynamic_shapes={"x": {0: "n[2:100]"}, "begins": {0: "p+1[1:50]"}, "columns": {0: "n"}},
        draw_inputs=_draw_product,
    )


def _draw_product(sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs, _ = _draw_segments(sizes, generator)
    return (*inputs, torch.randint(0, sizes["n"], (sizes["n"],), generator=generator)), {}


class _Neighbours(torch.nn.Module):
    """The differences between points and their neighbours."""

    def forward(self, points: Tensor) -> Tensor:
        ones, others = torch.ops.torch_cluster.knn(points, points, None, None, 3, False, 1)
        return points[ones] - points[others]


def torch_cluster() -> ExportSpec:
    """Neighbours, like torch_scatter; how many there are depends on data."""
    importlib.import_module("torch_cluster")

    @_fake(torch.ops.torch_cluster.knn.default)
    def _(x: Tensor, *_: Any) -> Tensor:
        return x.new_empty(2, torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)

    return ExportSpec(
        model=_Neighbours(), example_inputs=(torch.randn(20, 3),), dynamic_shapes={"points": {0: "n[5:100]"}}
    )


class _Splines(torch.nn.Module):
    """Weights of a convolution that splines over two coordinates mix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(25, 4, 6))
        self.register_buffer("sizes", torch.tensor([5, 5]))
        self.register_buffer("is_open", torch.ones(2, dtype=torch.uint8))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        ops = torch.ops.torch_spline_conv
        basis, index = ops.spline_basis(places, self.sizes, self.is_open, 1)
        weighted: Tensor = ops.spline_weighting(x, self.weight, basis, index)
        return weighted


def torch_spline_conv() -> ExportSpec:
    """A convolution, like torch_scatter."""
    importlib.import_module("torch_spline_conv")

    @_fake(torch.ops.torch_spline_conv.spline_basis.default)
    def _(places: Tensor, sizes: Tensor, is_open: Tensor, degree: int) -> tuple[Tensor, Tensor]:
        shape = places.shape[0], (degree + 1) ** places.shape[1]
        return places.new_empty(shape), places.new_empty(shape, dtype=torch.int64)

    @_fake(torch.ops.torch_spline_conv.spline_weighting.default)
    def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[2])

    return ExportSpec(
        model=_Splines(),
        example_inputs=(torch.randn(7, 4), torch.rand(7, 2)),
        dynamic_shapes={"x": {0: "edges[1:100]"}, "places": {0: "edges"}},
    )


class _Filter(torch.nn.Module):
    """A recursive filter whose coefficients change with time."""

    def forward(self, x: Tensor, coefficients: Tensor) -> Tensor:
        before = x.new_zeros(x.shape[0], coefficients.shape[2])
        filtered: Tensor = torch.ops.torchlpc.lpc(x, coefficients, before)
        return filtered


def torchlpc() -> ExportSpec:
    """A filter."""
    importlib.import_module("torchlpc")

    @torch.library.register_fake("torchlpc::lpc")
    def _(x: Tensor, coefficients: Tensor, before: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    return ExportSpec(
        model=_Filter(),
        example_inputs=(torch.randn(2, 30), torch.randn(2, 30, 3) / 10),
        dynamic_shapes={"x": {0: "batch[1:8]", 1: "time[1:200]"}, "coefficients": {0: "batch", 1: "time"}},
    )


def _fake(operator: torch._ops.OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a fake kernel beside a kernel for all devices, which torch.library.register_fake does not do."""
    registered: Callable[[Callable[..., Any]], Callable[..., Any]] = operator.py_impl(torch._C.DispatchKey.Meta)
    return registered


_FROM_SOURCES = "The wheel needs CUDA: tried with its sources of nms and roi_align, built for a CPU."

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
    Library(
        "torchvision 0.28.0, detector",
        "torchvision==0.28.0",
        data.torchvision_detector,
        "torchvision",
        ("cpu", "cuda"),
        _FROM_SOURCES,
    ),
    Library(
        "torchvision 0.28.0, boxes",
        "torchvision==0.28.0",
        data.torchvision_boxes,
        "torchvision",
        ("cpu", "cuda"),
        _FROM_SOURCES,
    ),
    Library("torch-harmonics 0.9.3", "torch-harmonics==0.9.3", torch_harmonics, "torch_harmonics"),
    Library("torch-quickfps 2.1.0", "torch-quickfps==2.1.0", torch_quickfps, "torch_quickfps"),
    Library("torch-scatter 2.1.2", "torch-scatter==2.1.2", torch_scatter, "torch_scatter"),
    Library("torch-sparse 0.6.18", "torch-sparse==0.6.18", torch_sparse, "torch_sparse"),
    Library("torch-cluster 1.6.3", "torch-cluster==1.6.3", torch_cluster, "torch_cluster"),
    Library("torch-spline-conv 1.2.2", "torch-spline-conv==1.2.2", torch_spline_conv, "torch_spline_conv"),
    Library("torchlpc 0.7.2", "torchlpc==0.7.2", torchlpc, "torchlpc"),
)
