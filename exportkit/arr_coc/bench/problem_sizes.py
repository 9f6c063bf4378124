"""The table of benchmark sizes: sizes of a vision pipeline, smaller on a CPU.

An operator without an entry is timed with the samples of its SPEC. Some have a function of a library that does the same
beside them, with the operator's signature. It is timed after its results were compared with the reference's. Small
differences are allowed: a library may break ties in another way. Some references compute half types in float32, which
takes a pass for each cast. For these operators, the function here computes without the casts.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from exportkit.arr_coc.ops import SPECS, OpSpec

# --- library functions that do the same -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LibraryCall:
    """An alternative to an operator. `needs` is the package to install; None for torch."""

    what: str
    function: Callable[..., Any]
    needs: str | None = None

    @property
    def missing(self) -> str | None:
        """Why it cannot be timed here; None if it can."""
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"{self.needs} is not installed"


def _kornia(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from kornia.color import rgb_to_grayscale, rgb_to_lab
    from kornia.filters import spatial_gradient

    gradients = spatial_gradient(rgb_to_grayscale(rgb), mode="sobel", order=1, normalized=True)
    return rgb_to_lab(rgb), gradients[:, :, 0], gradients[:, :, 1]


def _categorical(features: Tensor) -> Tensor:
    entropy = torch.distributions.Categorical(logits=features, validate_args=False).entropy()
    return entropy / math.log(features.shape[-1])


def _cosine_similarity(features: Tensor, query: Tensor) -> Tensor:
    return (1 + functional.cosine_similarity(features, query.unsqueeze(1), dim=-1)) / 2


def _topk(scores: Tensor, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    indices = torch.topk(scores, k, dim=1).indices
    return features.gather(1, indices.unsqueeze(-1).expand(-1, -1, features.shape[-1])), indices


def _rms_norm_quantize(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    normed = functional.rms_norm(x, weight.shape, weight, 1e-6)
    scale = normed.abs().amax(-1).float() / 127
    return (normed / scale.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8), scale


def _add_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.add(a, b, out=out)


KORNIA = LibraryCall("kornia's rgb_to_lab and spatial_gradient", _kornia, needs="kornia")
CATEGORICAL = LibraryCall("torch.distributions.Categorical.entropy", _categorical)
COSINE_SIMILARITY = LibraryCall("torch.nn.functional.cosine_similarity", _cosine_similarity)
TOPK = LibraryCall("torch.topk and gather", _topk)
LAYER_NORM = LibraryCall(
    "torch.nn.functional.layer_norm", lambda x, weight, bias: functional.layer_norm(x, weight.shape, weight, bias)
)
LINEAR = LibraryCall("torch.nn.functional.linear", functional.linear)
RMS_NORM = LibraryCall("torch.nn.functional.rms_norm, amax, round, clamp", _rms_norm_quantize)
SOFTMAX = LibraryCall("torch.softmax", lambda x: torch.softmax(x, -1))
SUM = LibraryCall("torch.sum", lambda x, dim: torch.sum(x, dim))
RELU = LibraryCall("torch.relu", torch.relu)
BIAS_RELU = LibraryCall("x + bias and torch.relu_", lambda x, bias: torch.relu_(x + bias))
SCALE_BIAS_RELU = LibraryCall(
    "torch.add(alpha=) and torch.relu_", lambda x, bias, scale: torch.relu_(torch.add(bias, x, alpha=scale))
)
ADDCMUL = LibraryCall("torch.addcmul", lambda a, b, c: torch.addcmul(a.new_full((), c), a, b))
ADD_OUT = LibraryCall("torch.add(out=)", _add_out)


K, PATCH = 200, 16


@dataclass(frozen=True)
class RandomTensor:
    """A random tensor, "uniform" in [0, 1) or "normal". If `dtype` is None, it has the benchmark's dtype."""

    shape: tuple[int, ...]
    kind: str
    dtype: torch.dtype | None = None

    def draw(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Draws the tensor on the device from torch's global generator."""
        make = torch.rand if self.kind == "uniform" else torch.randn
        return make(self.shape, device=device, dtype=torch.float32).to(self.dtype or dtype)


def uniform(*shape: int) -> RandomTensor:
    """Returns values in [0, 1), like colours and scores."""
    return RandomTensor(shape, "uniform")


def normal(*shape: int) -> RandomTensor:
    """Returns normally distributed values, like features."""
    return RandomTensor(shape, "normal")


@dataclass(frozen=True)
class BytesMoved:
    """The data that must move: elements of the benchmark's dtype, and further bytes."""

    elements: int
    beside: int = 0


@dataclass(frozen=True)
class Benchmark:
    """One call to time, at a size in the operator's letters. Tensors among its arguments are `RandomTensor`.

    What must move is every input and every output once, and for the gradient every differentiable input, its gradient
    and the outputs' gradients, unless it says otherwise. The share `agreement` of elements must agree with the
    reference: below 1 if ties may be broken differently.
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
            lambda x: x.draw(device, dtype) if isinstance(x, RandomTensor) else x, (self.args, dict(self.kwargs))
        )


@dataclass(frozen=True)
class TimedOperator:
    """An operator or a chain of operators, which is timed against its reference.

    `differentiable` names the arguments whose gradients are timed; it may be empty.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    tolerance: Callable[[torch.dtype], tuple[float, float]]
    differentiable: tuple[str, ...]
    benchmarks: tuple[Benchmark, ...]


def subjects(device: torch.device) -> dict[str, TimedOperator]:
    """Returns everything that can be timed on a device, by name: operators in their order, then chains."""
    on_gpu = device.type == "cuda"
    found = {}
    for name, spec in SPECS.items():
        if not name.endswith(("_forward", "_grad")):  # timed with the operator they belong to
            benchmarks = TABLE[name](on_gpu) if name in TABLE else _of_samples(spec, device)
            timed = () if name in _GRADIENT_IS_A_VIEW else spec.differentiable
            found[name] = TimedOperator(name, spec.wrapper, spec.reference, spec.tolerance, timed, tuple(benchmarks))
    if "relevance_scores" in SPECS:
        found["scores_to_budgets"] = _scores_to_budgets(on_gpu)
    return found


# --- the table --------------------------------------------------------------------------------------------------------

# Sizes (batch, side), (batch, patches, width) and (rows, columns), by whether they are for a GPU.
_IMAGES = {True: [(1, 448), (1, 1024), (8, 1024), (32, 1024)], False: [(1, 448), (2, 1024)]}
_FEATURES = {True: [(1, 1024, 768), (8, 4096, 1024), (64, 4096, 1024)], False: [(1, 1024, 384), (8, 1024, 384)]}
_ROWS = {True: [(65536, 1024), (16384, 4096), (4096, 1024)], False: [(4096, 1024), (1024, 768)]}
_ROW_DTYPE = {True: torch.float16, False: torch.float32}
_WEIGHTS = RandomTensor((3,), "uniform")
_GRADIENT_IS_A_VIEW = {"reduce_sum"}  # in ATen and in exportkit: nothing is computed, so there is nothing to time

Table = Callable[[bool], Iterable[Benchmark]]


def _features(arguments: Callable[[int, int, int], tuple[Any, ...]], label: str = "", **options: Any) -> Table:
    """Benchmarks of features [B, N, D]."""
    return lambda on_gpu: (
        Benchmark(f"B{b} N{n} D{d}{label}", arguments(b, n, d), **options) for b, n, d in _FEATURES[on_gpu]
    )


def _rows(
    arguments: Callable[[int, int], tuple[Any, ...]],
    label: str = "",
    library: LibraryCall | None = None,
    **options: Any,
) -> Table:
    """Benchmarks of rows [R, D]."""
    return lambda on_gpu: (
        Benchmark(f"{r}x{d}{label}", arguments(r, d), dtype=_ROW_DTYPE[on_gpu], library=library, **options)
        for r, d in _ROWS[on_gpu]
    )


def _both(first: Table, second: Table) -> Table:
    return lambda on_gpu: [*first(on_gpu), *second(on_gpu)]


def _fused_texture(on_gpu: bool) -> Iterator[Benchmark]:
    for batch, side in _IMAGES[on_gpu]:
        yield Benchmark(f"{batch}x3x{side}x{side}", (uniform(batch, 3, side, side),), library=KORNIA)


def _texture_statistics(on_gpu: bool) -> Iterator[Benchmark]:
    for batch, side in _IMAGES[on_gpu]:
        side -= side % PATCH
        yield Benchmark(f"{batch}x3x{side}x{side} P{PATCH}", (uniform(batch, 3, side, side), PATCH))


def _salience_arguments(b: int, n: int, d: int) -> tuple[Any, ...]:
    side = round(n**0.5) * PATCH
    return normal(b, n, d), uniform(b, 3, side, side), uniform(b, 1, side, side), uniform(b, 1, side, side), PATCH


def _relevance_arguments(b: int, n: int, d: int) -> tuple[Any, ...]:
    side = round(n**0.5)
    return normal(b, n, d), normal(b, d), normal(b, 3, side, side), uniform(b, 1, side, side), _WEIGHTS


def _opponent_balance(on_gpu: bool) -> Iterator[Benchmark]:
    for b, n, _ in _FEATURES[on_gpu]:
        yield Benchmark(f"B{b} N{n}", (uniform(b, n), uniform(b, n), uniform(b, n), _WEIGHTS))


def _top_k_patches(on_gpu: bool) -> Iterator[Benchmark]:
    for b, n, d in _FEATURES[on_gpu]:
        yield Benchmark(
            f"B{b} N{n} D{d} k{K}",
            (uniform(b, n), normal(b, n, d), K),
            library=TOPK,
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


def _invariant_linear(on_gpu: bool) -> Iterator[Benchmark]:
    """The layers of ViT-small, for one image of 448x448 and, on a GPU, for 64."""
    for images in (1, 64) if on_gpu else (1,):
        for products, width in [(384, 1152), (384, 384), (384, 1536), (1536, 384)]:
            yield Benchmark(
                f"{784 * images}x{products} to {width}",
                (normal(784 * images, products), normal(width, products), normal(width)),
                library=LINEAR,
            )


TABLE: Mapping[str, Table] = {
    "fused_texture": _fused_texture,
    "texture_statistics": _texture_statistics,
    "compute_entropy": _features(lambda b, n, d: (normal(b, n, d),), library=CATEGORICAL),
    "query_alignment": _features(lambda b, n, d: (normal(b, n, d), normal(b, d)), library=COSINE_SIMILARITY),
    "compute_salience": _features(_salience_arguments, f" P{PATCH}"),
    "opponent_balance": _opponent_balance,
    "relevance_scores": _both(
        _features(_relevance_arguments),
        _features(_relevance_arguments, ", no feature salience", kwargs={"salience_weights": [0.5, 0.5, 0.0]}),
    ),
    "top_k_patches": _top_k_patches,
    "allocate_lod_tokens": _allocate_lod_tokens,
    "select_patches": _select_patches,
    "fused_layer_norm": _rows(lambda r, d: (normal(r, d), normal(d), normal(d)), library=LAYER_NORM),
    "invariant_linear": _invariant_linear,
    # x / rms may be within a rounding error of half a step
    "rms_norm_quantize": _rows(lambda r, d: (normal(r, d), normal(d)), library=RMS_NORM, agreement=0.999),
    "softmax": _rows(lambda r, d: (normal(r, d),), library=SOFTMAX),
    "reduce_sum": _both(
        _rows(lambda r, d: (normal(r, d), 1), " dim 1", library=SUM),
        _rows(lambda r, d: (normal(r, d), 0), " dim 0", library=SUM),
    ),
    "relu": _rows(lambda r, d: (normal(r, d),), library=RELU),
    "bias_relu": _rows(lambda r, d: (normal(r, d), normal(d)), library=BIAS_RELU),
    "scale_bias_relu": _rows(lambda r, d: (normal(r, d), normal(d), 0.5), library=SCALE_BIAS_RELU),
    "muladd": _rows(lambda r, d: (normal(r, d), normal(r, d), 0.5), library=ADDCMUL),
    "add_out": _rows(lambda r, d: (normal(r, d),) * 3, library=ADD_OUT),
}


def _of_samples(spec: OpSpec, device: torch.device) -> Iterator[Benchmark]:
    """Yields the samples of a SPEC that are not empty."""
    for sample in spec.samples(device, spec.dtypes[0]):
        if all(arg.numel() for arg in sample.args if isinstance(arg, Tensor)):
            yield Benchmark(sample.label, sample.args, sample.kwargs, dtype=spec.dtypes[0])


def _scores_to_budgets(on_gpu: bool) -> TimedOperator:
    """Computes selected patches and their budgets from features, like the model in eval mode; reads features once."""

    def chain(which: str) -> Callable[..., Any]:
        scores, select = (getattr(SPECS[name], which) for name in ("relevance_scores", "select_patches"))

        def run(features: Tensor, query: Tensor, colours: Tensor, edges: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
            relevance = scores(features, query, colours, edges, weights, salience_weights=[0.5, 0.5, 0.0])
            return select(relevance, features, K, *colours.shape[2:])

        return run

    benchmarks = []
    for b, n, d in _FEATURES[on_gpu]:
        # Every feature once for its score; selected features read again and written; colours, edges; selected scores;
        # indices, budgets, positions.
        moved = BytesMoved(b * (n * (d + 4) + 2 * K * d + K), 24 * b * K)
        args = _relevance_arguments(b, n, d)
        benchmarks.append(Benchmark(f"B{b} N{n} D{d} k{K}", args, moved=moved, agreement=0.98))
    tolerance = SPECS["relevance_scores"].tolerance
    return TimedOperator("scores_to_budgets", chain("wrapper"), chain("reference"), tolerance, (), tuple(benchmarks))
