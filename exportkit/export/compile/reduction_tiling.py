"""Reductions over rows that walk along the rows, in the code that Inductor writes for CPUs."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import sympy
import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.codegen.cpp import CppVecKernel, TilingSelect
from torch._inductor.codegen.cpp_utils import _get_dtype_from_loopbodies, _get_loop_body
from torch._inductor.virtualized import V

from exportkit.export.torch_patches.patched import Function, all_patched

VECTORS = 8  # Two are loaded in a cycle, and an addition takes four. Sixteen would not fit the registers of AVX2.
_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
_FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.bool}
_APART = 8  # Places that columns are gathered from, element by element: each takes as many lines as there are columns.
_STORED = re.compile(r"auto ((?:at_|bool_)\w+_vec) = [^;]+;\s+\1\.store\([^;]+;")

# torch converts more than one vector of 16 bits by its elements.
_CONVERT = """
#ifndef EXPORTKIT_CONVERT
#define EXPORTKIT_CONVERT
namespace at::vec {
template <int F, typename H, int N>
struct VecConvert<float, F, H, N, std::enable_if_t<is_reduced_floating_point_v<H> && (N > 1) && F == 2 * N>> {
  static inline VectorizedN<float, F> apply(const VectorizedN<H, N>& half) {
    VectorizedN<float, F> all;
    for (int i = 0; i < N; ++i) std::tie(all[2 * i], all[2 * i + 1]) = convert_to_float<H>(half[i]);
    return all;
  }
};
template <typename H, int N, int F>
struct VecConvert<H, N, float, F, std::enable_if_t<is_reduced_floating_point_v<H> && (N > 1) && F == 2 * N>> {
  static inline VectorizedN<H, N> apply(const VectorizedN<float, F>& all) {
    VectorizedN<H, N> half;
    for (int i = 0; i < N; ++i) half[i] = convert_from_float<H>(all[2 * i], all[2 * i + 1]);
    return half;
  }
};
}
#endif
"""


def reduction_tiling() -> AbstractContextManager[None]:
    """Lets a reduction over rows take several vectors of a row at a time.

    Inductor takes one, or one element where the columns are apart, and walks down all rows before it takes the next: it
    reads a part of each line of the cache. Over 4,096 rows of 1,024 columns a sum took four times as long as eager's.
    """
    return all_patched(
        ("TilingSelect.select_tiling", _several_vectors),
        ("CppVecKernel.reduction_combine_vec", _whole_vectors),
        ("KernelGroup.codegen_group", _with_conversions),
    )


def _several_vectors(select: Function, tiling: TilingSelect, bodies: Any, sizes: Any) -> Any:
    factors, indices, *more = select(tiling, bodies, sizes)
    kept, reduced = max(sizes, key=lambda pair: len(pair[1]))
    dtypes = _get_dtype_from_loopbodies(_get_loop_body(bodies))
    if not reduced or not (dtypes <= _FLOATS or dtypes == {torch.float64}):
        return factors, indices, *more  # torch converts several vectors of other types by their elements.
    one = cpu_vec_isa.pick_vec_isa().nelements()
    most = VECTORS * one // (2 if torch.float64 in dtypes else 1)
    again = not indices and bool(more) and 0 < sum(more[0].non_contig_indexing_op_counter.values()) <= _APART
    found = tiling._select_tiling_indices(bodies, sizes, one) if again else indices
    if len(found) == 1 and 0 <= found[0] < len(kept):
        wide, columns = one, kept[found[0]]
        while wide < most and not V.graph.sizevars.statically_known_true(sympy.Le(columns, wide)):
            wide *= 2
        if not again or wide > one:
            return [max([wide, *factors])], found, *more
    return factors, indices, *more


def _whole_vectors(combine: Function, kernel: CppVecKernel, *args: Any, **kwargs: Any) -> Any:
    """Combines the last columns without a mask. They do not fill a vector, and what is beyond them is not stored."""
    assert kernel.reduction_depth is not None
    tail = kernel.tail_size
    if kernel.tiling_idx < kernel.reduction_depth:
        kernel.tail_size = None
    try:
        return combine(kernel, *args, **kwargs)
    finally:
        kernel.tail_size = tail


def _with_conversions(write: Function, *args: Any, **kwargs: Any) -> str:
    # Two equal reductions, such as x.sum(0) and x.T.sum(1), are one, which is stored twice under one name.
    code = _STORED.sub(r"{ \g<0> }", write(*args, **kwargs))
    return code.replace(_HEADER, _HEADER + _CONVERT, 1) if "at::vec::convert<" in code else code
