"""The ARR-COC vision pipeline. It finds the patches of an image that matter for a query and their token budgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exportkit.arr_coc.model.build import build, check_arguments, load_weights, save_weights
from exportkit.arr_coc.model.pipeline import ARRCOC, FromFeatures
from exportkit.arr_coc.model.region import Region, region_query
from exportkit.errors import UsageError
from exportkit.spec import ExportSpec, Tolerance

__all__ = [
    "ARRCOC",
    "FromFeatures",
    "Region",
    "build",
    "export_spec",
    "features_spec",
    "load_weights",
    "region_query",
    "save_weights",
]

MAX_BATCH, MAX_TOKENS, MAX_ROWS = 64, 64, 64

Draw = Callable[[Mapping[str, int], torch.Generator], tuple[tuple[Any, ...], dict[str, Any]]]


def export_spec(*, query_tokens: bool = False, **model_kwargs: Any) -> ExportSpec:
    """Returns the spec of the built-in model `arr-coc`.

    The batch size is 1 to 64. Height and width are 2 patches (4 for a transformer) to 64, independently of each other.

    Args:
        query_tokens: Trace queries [B, T, Dq] with mask [B, T], T 1 to 64, instead of [B, Dq].
        **model_kwargs: The arguments of `build`.

    Raises:
        UsageError: An argument is invalid.
        WeightsError: A weights file does not fit.
    """
    check_arguments(model_kwargs, beside=["query_tokens"])
    if model_kwargs.get("encoder") == "given":
        said = "arr-coc needs an encoder other than given"
        raise UsageError(said, hint="To give features as an input, use MODEL exportkit.arr_coc.model:features_spec.")
    model = build(**model_kwargs)
    patch = model.encoder.patch_size
    rows = f"[{max(2, model.encoder.min_rows)}:{MAX_ROWS}]"
    image = {0: f"batch[1:{MAX_BATCH}]", 2: f"{patch}*gh{rows}", 3: f"{patch}*gw{rows}"}
    if query_tokens:
        tokens = {0: f"batch[1:{MAX_BATCH}]", 1: f"tokens[1:{MAX_TOKENS}]"}
        dynamic = {"image": image, "query": tokens, "mask": tokens}
    else:
        dynamic = {"image": image, "query": {0: f"batch[1:{MAX_BATCH}]"}}
    draw = _drawer(patch, model.query_dim, query_tokens)
    # More patches than the default K; all sizes differ from each other and from K.
    args, kwargs = draw({"batch": 2, "gh": 15, "gw": 17, "tokens": 5}, torch.Generator().manual_seed(0))
    return ExportSpec(
        model=model,
        example_inputs=args,
        example_kwargs=kwargs,
        dynamic_shapes=dynamic,
        tolerances=output_tolerances(model),
        name="arr_coc",
        draw_inputs=draw,
    )


def features_spec(*, dim: int = 1024, **model_kwargs: Any) -> ExportSpec:
    """Returns the spec of the pipeline without its encoder, MODEL `exportkit.arr_coc.model:features_spec`.

    It takes images, features of the caller's encoder, and queries. Batch, height and width vary as in `export_spec`.

    Args:
        dim: The width of the features.
        **model_kwargs: The arguments of `build`, except `encoder`.

    Raises:
        UsageError: An argument is invalid.
    """
    if "encoder" in model_kwargs:
        raise UsageError("features_spec takes no encoder: features are an input", hint="Use arr-coc for an encoder.")
    arguments = {"encoder": "given", "dim": dim, **model_kwargs}
    check_arguments(arguments)
    model = build(**arguments)
    patch = model.encoder.patch_size
    batch, gh, gw = f"batch[1:{MAX_BATCH}]", f"gh[2:{MAX_ROWS}]", f"gw[2:{MAX_ROWS}]"

    def draw(sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch, rows, columns = sizes["batch"], sizes["gh"], sizes["gw"]
        image = draw_image(batch, patch * rows, patch * columns, generator)
        features = torch.randn(batch, rows, columns, dim, generator=generator)
        return (image, features, torch.randn(batch, model.query_dim, generator=generator)), {}

    args, kwargs = draw({"batch": 2, "gh": 15, "gw": 17}, torch.Generator().manual_seed(0))
    return ExportSpec(
        model=FromFeatures(model).eval(),
        example_inputs=args,
        example_kwargs=kwargs,
        dynamic_shapes={
            "image": {0: batch, 2: f"{patch}*{gh}", 3: f"{patch}*{gw}"},
            "features": {0: batch, 1: gh, 2: gw},
            "query": {0: batch},
        },
        tolerances=output_tolerances(model),
        name="arr_coc_features",
        draw_inputs=draw,
    )


def output_tolerances(model: ARRCOC) -> dict[str, Tolerance]:
    """Returns the tolerances of all outputs but scores and relevance, which must be as accurate as eager.

    A compiled program sums in another order. Then it may select another patch if two relevances are nearly equal, and a
    budget may differ by one token due to rounding.
    """
    features = {"features": Tolerance(rows_of="indices")}
    if model.selector.feature_dtype == "int8":
        features = {
            "features": Tolerance(0.0, 1.0, rows_of="indices"),
            "feature_scales": Tolerance(1e-3, 1e-6, rows_of="indices"),
        }
    return {
        **features,
        "indices": Tolerance(ranking_of="relevance"),
        "budgets": Tolerance(0.0, 1.0),
        "positions": Tolerance(0.0, 1e-6, rows_of="indices"),
    }


def _drawer(patch_size: int, query_dim: int, query_tokens: bool) -> Draw:
    def draw(sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch, rows, columns = sizes["batch"], sizes["gh"], sizes["gw"]
        image = draw_image(batch, patch_size * rows, patch_size * columns, generator)
        if not query_tokens:
            return (image, torch.randn(batch, query_dim, generator=generator)), {}
        tokens = sizes["tokens"]
        query = torch.randn(batch, tokens, query_dim, generator=generator)
        lengths = torch.randint(1, tokens + 1, (batch, 1), generator=generator)
        return (image, query, torch.arange(tokens) < lengths), {}

    return draw


def draw_image(batch: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draws random images with structure: blobs of colour at three scales with a little noise.

    In plain noise all patches are about equally relevant, so their ranking would be meaningless.

    Returns:
        float32 [batch, 3, height, width] in [0, 1].
    """
    image = torch.zeros(batch, 3, height, width)
    for cells in (3, 11, 37):
        blobs = torch.rand(batch, 3, cells, cells, generator=generator)
        image += functional.interpolate(blobs, size=(height, width), mode="bilinear", align_corners=False)
    noise = 0.1 * (torch.rand(batch, 3, height, width, generator=generator) - 0.5)
    return (1.4 * (image / 3 - 0.5) + 0.5 + noise).clamp_(0, 1)
