"""Products of one row with a matrix of weights, in the code that Inductor writes for GPUs (docs/adr/0071).

A language model's next token is one row. It takes as long as reading the weights. cuBLAS reads a few megabytes at half
of the memory's rate. So do Inductor's own sums over rows: a block has 512 threads with eight elements each, and spends
most of its time before and after it reads. The model's other kernels are so short that starting them takes most of the
time. So those that do not need one another become one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import sympy
import torch
from torch._inductor import config
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import lowerings
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.runtime_utils import last_power_of_2, next_power_of_2
from torch._inductor.virtualized import V

from exportkit.export.torch_patches.patched import Function, all_patched

ELEMENTS = 8  # of a row that a thread reads at a time: 16 bytes, or 32 of float32
THREADS = (64, 512)  # of a block
_DTYPES = {torch.float16, torch.bfloat16, torch.float32}

_aten = torch.ops.aten
_ROW = {_aten.mm.default: 0, _aten.addmm.default: 1}
"""The position of the row among the arguments, before the matrix."""

_WITH_PRODUCTS: WeakSet[GraphLowering] = WeakSet()


@contextmanager
def vector_products() -> Iterator[None]:
    """Lets Inductor write products of one row itself while the block runs.

    What comes after the product is computed with it. The row is computed once, before it: Inductor would compute it
    again for each of the matrix' rows.
    """
    changes = all_patched(
        ("compile_fx.select_decomp_table", _whole),
        ("GraphLowering.call_function", _with_products),
        ("InductorChoices.triton_kernel_kwargs", _with_blocks),
        ("ForeachKernelSchedulerNode.combinable_nodes", _beside_products),
    )
    with changes, config.patch(combo_kernels=True, combo_kernels_pointwise_only=True):
        yield


def is_vector_product(row: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Tells whether row [1, k] times matrix [k, n] is such a product: each of the n outputs reads memory in order."""
    if row.device.type != "cuda" or not row.dtype == matrix.dtype in _DTYPES:
        return False
    sizes = (*row.shape, *matrix.shape)
    return all(isinstance(size, int) for size in sizes) and row.shape[0] == 1 and matrix.stride() == (1, row.shape[1])


def _whole(select: Function) -> dict[Any, Function]:
    """Keeps products of one row from being taken apart, whatever Inductor's options say."""
    table = dict(select())
    otherwise = table[_aten.mm.default]

    def apart(row: torch.Tensor, matrix: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if is_vector_product(row, matrix) else otherwise(row, matrix, *args, **kwargs)

    return {**table, _aten.mm.default: apart}


def _with_products(call: Function, graph: GraphLowering, target: Any, args: Any, kwargs: Any) -> Any:
    if target in _ROW:
        node: Any = V.graph.current_node
        row, matrix = (factor.meta["val"] for factor in node.args[_ROW[target] :])
        if is_vector_product(row, matrix):
            _WITH_PRODUCTS.add(graph)
            return (_product if target is _aten.mm.default else _sum_with)(*args, **kwargs)
    return call(graph, target, args, kwargs)


def _beside_products(combinable: Function, cls: type, nodes: list[Any]) -> Any:
    """Lets Inductor combine kernels in graphs with such products alone."""
    return combinable(cls, nodes) if V.graph in _WITH_PRODUCTS else []


def _product(row: Any, matrix: Any) -> Any:
    return _to(row.get_dtype(), _sums(row, matrix))


def _sum_with(bias: Any, row: Any, matrix: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    total = lowerings[_aten.mul.Tensor](_sums(row, matrix), alpha)
    if beta:  # otherwise not even NaN of the bias counts
        scaled = lowerings[_aten.mul.Tensor](_to(torch.float32, bias), beta)
        total = lowerings[_aten.add.Tensor](total, scaled)
    return _to(row.get_dtype(), total)


def _sums(row: Any, matrix: Any) -> Any:
    """Writes the product as sums in float32, [1, n]."""
    row.realize()
    columns = lowerings[_aten.permute.default](matrix, [1, 0])
    factors = lowerings[_aten.mul.Tensor](_to(torch.float32, columns), _to(torch.float32, row))
    return lowerings[_aten.unsqueeze.default](lowerings[_aten.sum.dim_IntList](factors, [1]), 0)


def _to(dtype: torch.dtype, value: Any) -> Any:
    return lowerings[torch.ops.prims.convert_element_type.default](value, dtype)


def _with_blocks(choose: Function, choices: Any, kind: Any, features: SIMDKernelFeatures, *more: Any) -> Any:
    options = choose(choices, kind, features, *more)
    if _are_products(features) and "fixed_config" not in options:
        gpu = DeviceProperties.create(V.graph.get_current_device_or_throw())
        room = gpu.multi_processor_count * (gpu.max_threads_per_multi_processor or 2048)
        options |= {
            "fixed_config": FixedTritonConfig(blocks(int(features.numel), int(features.reduction_numel), room)),
            "override_persistent_reduction": False,
            "override_cooperative_reduction": False,
        }
    return options


def blocks(rows: int, length: int, room: int) -> dict[str, int]:
    """Chooses the blocks of Triton's kernel.

    A block reads one row. It has as many threads as let all blocks together fill the GPU once: with fewer, too few
    bytes are on their way; with more, threads have to wait for those before them. `room` is how many threads the GPU
    runs at once.
    """
    least, most = THREADS
    whole = next_power_of_2(length)
    threads = max(least, min(most, last_power_of_2(max(1, room // rows)), whole // ELEMENTS))
    width = min(threads * ELEMENTS, whole)
    return {
        "XBLOCK": threads * ELEMENTS // width,  # short rows share a block
        "R0_BLOCK": width,
        "num_warps": threads // 32,
        "num_stages": 1,
    }


def _are_products(features: SIMDKernelFeatures) -> bool:
    """Whether a kernel is one or several that `_sums` wrote, with what comes after them."""
    if not all(isinstance(size, (int, sympy.Integer)) for size in (features.numel, features.reduction_numel)):
        return False
    nodes: list[Any] = [each.node for each in features.reduction_nodes()]
    written = [any(origin.target in _ROW for origin in node.origins) for node in nodes]
    return bool(written) and all(written)
