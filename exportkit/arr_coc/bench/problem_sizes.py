"""The table of benchmark sizes: sizes of a vision pipeline, smaller on a CPU.

An operator without an entry is timed with the samples of its SPEC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from exportkit.arr_coc.bench import alternatives
from exportkit.arr_coc.bench.alternatives import LibraryCall
from exportkit.arr_coc.ops import SPECS, OpSpec

K, PATCH = 200, 16


@dataclass(frozen=True)
class InputSpec:
    """A random tensor, "uniform" in [0, 1) or "normal". If `dtype` is None, it has the benchmark's dtype."""

    shape: tuple[int, ...]
    kind: str
    dtype: torch.dtype | None = None

    def draw(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Draws the tensor on the device from torch's global generator."""
        make = torch.rand if self.kind == "uniform" else torch.randn
        return make(self.shape, device=device, dtype=torch.float32).to(self.dtype or dtype)


def uniform(*shape: int) -> InputSpec:
    """Returns values in [0, 1), like colours and scores."""
    return InputSpec(shape, "uniform")


def normal(*shape: int) -> InputSpec:
    """Returns normally distributed values, like features."""
    return InputSpec(shape, "normal")


@dataclass(frozen=True)
class BytesMoved:
    """The data that must move: elements of the benchmark's dtype, and further bytes."""

    elements: int
    beside: int = 0


@dataclass(frozen=True)
class Benchmark:
    """One call to time.

    Attributes:
        size: A label of the size, in the operator's letters.
        args: The positional arguments; tensors are `InputSpec`.
        kwargs: The keyword arguments.
        dtype: The default dtype of the floating tensors.
        library: A library's alternative.
        moved: The data that must move. None: every input and every output once.
        moved_backward: The data that must move for the gradient. None: every differentiable input, its gradient and the
            outputs' gradients once.
        agreement: The share of elements that must agree with the reference; below 1 if ties may be broken differently.
    """

    size: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    library: LibraryCall | None = None
    moved: BytesMoved | None = None
    moved_backward: BytesMoved | None = None
    agreement: float = 1.0

    def draw(self, device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Draws new arguments."""
        return tree_map(
            lambda x: x.draw(device, dtype) if isinstance(x, InputSpec) else x, (self.args, dict(self.kwargs))
        )


@dataclass(frozen=True)
class Subject:
    """An operator or a chain of operators, which is timed against its reference.

    `differentiable` names the arguments whose gradients are timed; it may be empty.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    tolerance: Callable[[torch.dtype], tuple[float, float]]
    differentiable: tuple[str, ...]
    benchmarks: tuple[Benchmark, ...]


def subjects(device: torch.device) -> dict[str, Subject]:
    """Returns everything that can be timed on a device, by name: operators in their order, then chains."""
    on_gpu = device.type == "cuda"
    found = {}
    for name, spec in SPECS.items():
        if not name.endswith(("_forward", "_grad")):  # timed with the operator they belong to
            benchmarks = tuple(TABLE[name](on_gpu)) if name in TABLE else tuple(_of_samples(spec, device))
            timed = () if name in _GRADIENT_IS_A_VIEW else spec.differentiable
            found[name] = Subject(name, spec.wrapper, spec.reference, spec.tolerance, timed, benchmarks)
    if "relevance_scores" in SPECS:
        found["scores_to_budgets"] = _scores_to_budgets(on_gpu)
    return found


# --- the table --------------------------------------------------------------------------------------------------------

# Sizes (batch, side), (batch, patches, width) and (rows, columns), by whether they are for a GPU.
_IMAGES = {True: [(1, 448), (1, 1024), (8, 1024), (32, 1024)], False: [(1, 448), (2, 1024)]}
_FEATURES = {True: [(1, 1024, 768), (8, 4096, 1024), (64, 4096, 1024)], False: [(1, 1024, 384), (8, 1024, 384)]}
_ROWS = {True: [(65536, 1024), (16384, 4096), (4096, 1024)], False: [(4096, 1024), (1024, 768)]}
_ROW_DTYPE = {True: torch.float16, False: torch.float32}
_WEIGHTS = InputSpec((3,), "uniform")
_GRADIENT_IS_A_VIEW = {"reduce_sum"}  # in ATen and in exportkit: nothing is computed, so there is nothing to time


def _fused_texture(on_gpu: bool) -> Iterator[Benchmark]:
    for batch, side in _IMAGES[on_gpu]:
        yield Benchmark(f"{batch}x3x{side}x{side}", (uniform(batch, 3, side, side),), library=alternatives.KORNIA)


def _texture_statistics(on_gpu: bool) -> Iterator[Benchmark]:
    for batch, side in _IMAGES[on_gpu]:
        side -= side % PATCH
        yield Benchmark(f"{batch}x3x{side}x{side} P{PATCH}", (uniform(batch, 3, side, side), PATCH))


def _compute_entropy(on_gpu: bool) -> Iterator[Benchmark]:
    for b, n, d in _FEATURES[on_gpu]:
        yield Benchmark(f"B{b} N{n} D{d}", (normal(b, n, d),), library=alternatives.CATEGORICAL)


def _query_alignment(on_gpu: bool) -> Iterator[Benchmark]:
    for b, n, d in _FEATURES[on_gpu]:
        args = (normal(b, n, d), normal(b, d))
        yield Benchmark(f"B{b} N{n} D{d}", args, library=alternatives.COSINE_SIMILARITY)


def _compute_salience(on_gpu: bool) -> Iterator[Benchmark]:
    for b, n, d in _FEATURES[on_gpu]:
        side = round(n**0.5) * PATCH
        maps = uniform(b, 3, side, side), uniform(b, 1, side, side), uniform(b, 1, side, side)
        yield Benchmark(f"B{b} N{n} D{d} P{PATCH}", (normal(b, n, d), *maps, PATCH))


def _opponent_balance(on_gpu: bool) -> Iterator[Benchmark]:
    for b, n, _ in _FEATURES[on_gpu]:
        yield Benchmark(f"B{b} N{n}", (uniform(b, n), uniform(b, n), uniform(b, n), _WEIGHTS))


def _top_k_patches(on_gpu: bool) -> Iterator[Benchmark]:
    for b, n, d in _FEATURES[on_gpu]:
        yield Benchmark(
            f"B{b} N{n} D{d} k{K}",
            (uniform(b, n), normal(b, n, d), K),
            library=alternatives.TOPK,
            # k rows of features are read and written; the gradient reads k rows and writes N.
            moved=BytesMoved(b * (n + 2 * K * d), 8 * b * K),
            moved_backward=BytesMoved(b * (K + n) * d, 8 * b * K),
        )


def _select_patches(on_gpu: bool) -> Iterator[Benchmark]:
    for b, n, d in _FEATURES[on_gpu]:
        side = round(n**0.5)
        # k rows and scores are read and written; indices, tokens and positions of 8 bytes each.
        moved = BytesMoved(b * (n + 2 * K * d + K), 24 * b * K)
        yield Benchmark(f"B{b} N{n} D{d} k{K}", (uniform(b, n), normal(b, n, d), K, side, side), moved=moved)


def _allocate_lod_tokens(on_gpu: bool) -> Iterator[Benchmark]:
    for b in (1, 8, 64):
        yield Benchmark(f"B{b} K{K}", (uniform(b, K),))
        yield Benchmark(f"B{b} K{K} total", (uniform(b, K), 64, 400, 1.0, K * 150))


def _relevance_scores(on_gpu: bool) -> Iterator[Benchmark]:
    for b, n, d in _FEATURES[on_gpu]:
        side = round(n**0.5)
        args = (normal(b, n, d), normal(b, d), normal(b, 3, side, side), uniform(b, 1, side, side), _WEIGHTS)
        yield Benchmark(f"B{b} N{n} D{d}", args)
        yield Benchmark(f"B{b} N{n} D{d}, no feature salience", args, {"salience_weights": [0.5, 0.5, 0.0]})


def _fused_layer_norm(on_gpu: bool) -> Iterator[Benchmark]:
    for rows, columns in _ROWS[on_gpu]:
        args = (normal(rows, columns), normal(columns), normal(columns))
        yield Benchmark(_rows(rows, columns), args, dtype=_ROW_DTYPE[on_gpu], library=alternatives.LAYER_NORM)


def _invariant_linear(on_gpu: bool) -> Iterator[Benchmark]:
    """The layers of ViT-small, for one image of 448x448 and, on a GPU, for 64."""
    for images in (1, 64) if on_gpu else (1,):
        for products, width in [(384, 1152), (384, 384), (384, 1536), (1536, 384)]:
            yield Benchmark(
                f"{784 * images}x{products} to {width}",
                (normal(784 * images, products), normal(width, products), normal(width)),
                library=alternatives.LINEAR,
            )


def _rms_norm_quantize(on_gpu: bool) -> Iterator[Benchmark]:
    for rows, columns in _ROWS[on_gpu]:
        args = (normal(rows, columns), normal(columns))
        # x / rms may be within a rounding error of half a step
        yield Benchmark(
            _rows(rows, columns), args, dtype=_ROW_DTYPE[on_gpu], library=alternatives.RMS_NORM, agreement=0.999
        )


def _softmax(on_gpu: bool) -> Iterator[Benchmark]:
    for rows, columns in _ROWS[on_gpu]:
        args = (normal(rows, columns),)
        yield Benchmark(_rows(rows, columns), args, dtype=_ROW_DTYPE[on_gpu], library=alternatives.SOFTMAX)


def _reduce_sum(on_gpu: bool) -> Iterator[Benchmark]:
    for rows, columns in _ROWS[on_gpu]:
        for dim in (1, 0):
            yield Benchmark(
                f"{_rows(rows, columns)} dim {dim}",
                (normal(rows, columns), dim),
                dtype=_ROW_DTYPE[on_gpu],
                library=alternatives.SUM,
            )


def _elementwise(
    *rest: Any, inputs: int = 1, bias: bool = False, library: LibraryCall | None = None
) -> Callable[[bool], Iterator[Benchmark]]:
    def benchmarks(on_gpu: bool) -> Iterator[Benchmark]:
        for rows, columns in _ROWS[on_gpu]:
            args = (normal(rows, columns),) * inputs + (normal(columns),) * bias
            yield Benchmark(_rows(rows, columns), (*args, *rest), dtype=_ROW_DTYPE[on_gpu], library=library)

    return benchmarks


def _add_out(on_gpu: bool) -> Iterator[Benchmark]:
    for rows, columns in _ROWS[on_gpu]:
        yield Benchmark(
            _rows(rows, columns),
            (normal(rows, columns),) * 3,
            dtype=_ROW_DTYPE[on_gpu],
            library=alternatives.ADD_OUT,
        )


def _rows(rows: int, columns: int) -> str:
    return f"{rows}x{columns}"


TABLE: Mapping[str, Callable[[bool], Iterable[Benchmark]]] = {
    "fused_texture": _fused_texture,
    "texture_statistics": _texture_statistics,
    "compute_entropy": _compute_entropy,
    "query_alignment": _query_alignment,
    "compute_salience": _compute_salience,
    "opponent_balance": _opponent_balance,
    "relevance_scores": _relevance_scores,
    "top_k_patches": _top_k_patches,
    "allocate_lod_tokens": _allocate_lod_tokens,
    "select_patches": _select_patches,
    "fused_layer_norm": _fused_layer_norm,
    "invariant_linear": _invariant_linear,
    "rms_norm_quantize": _rms_norm_quantize,
    "softmax": _softmax,
    "reduce_sum": _reduce_sum,
    "relu": _elementwise(library=alternatives.RELU),
    "bias_relu": _elementwise(bias=True, library=alternatives.BIAS_RELU),
    "scale_bias_relu": _elementwise(0.5, bias=True, library=alternatives.SCALE_BIAS_RELU),
    "muladd": _elementwise(0.5, inputs=2, library=alternatives.ADDCMUL),
    "add_out": _add_out,
}


def _of_samples(spec: OpSpec, device: torch.device) -> Iterator[Benchmark]:
    """Yields the samples of a SPEC that are not empty."""
    for sample in spec.samples(device, spec.dtypes[0]):
        if all(arg.numel() for arg in sample.args if isinstance(arg, Tensor)):
            yield Benchmark(sample.label, sample.args, sample.kwargs, dtype=spec.dtypes[0])


def _scores_to_budgets(on_gpu: bool) -> Subject:
    """Computes selected patches and their budgets from features, like the model in eval mode; reads features once."""

    def chain(which: str) -> Callable[..., Any]:
        scores, select = (getattr(SPECS[name], which) for name in ("relevance_scores", "select_patches"))

        def run(features: Tensor, query: Tensor, colours: Tensor, edges: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
            relevance = scores(features, query, colours, edges, weights, salience_weights=[0.5, 0.5, 0.0])
            return select(relevance, features, K, *colours.shape[2:])

        return run

    benchmarks = []
    for b, n, d in _FEATURES[on_gpu]:
        side = round(n**0.5)
        args = (normal(b, n, d), normal(b, d), normal(b, 3, side, side), uniform(b, 1, side, side), _WEIGHTS)
        # Every feature once for its score; selected features read again and written; colours, edges; selected scores;
        # indices, budgets, positions.
        moved = BytesMoved(b * (n * (d + 4) + 2 * K * d + K), 24 * b * K)
        benchmarks.append(Benchmark(f"B{b} N{n} D{d} k{K}", args, moved=moved, agreement=0.98))
    tolerance = SPECS["relevance_scores"].tolerance
    return Subject("scores_to_budgets", chain("wrapper"), chain("reference"), tolerance, (), tuple(benchmarks))
