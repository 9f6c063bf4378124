"""Says how the part of a language model that sees is exported: `vision_spec(model, inputs)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from exportkit.errors import UsageError
from exportkit.spec import DrawInputs, DynamicShapes, ExportSpec
from exportkit.transformers.images import ImageFeatures, image_token
from exportkit.transformers.language_model import checked_model


def vision_spec(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    dynamic_shapes: DynamicShapes = None,
    draw_inputs: DrawInputs | None = None,
    name: str | None = None,
) -> ExportSpec:
    """Returns how to export what a language model makes of images: `features`, for `prefill_images` of `spec`.

    Args:
        model: As for `spec`.
        inputs: An example of what a processor makes of images, such as {"pixel_values": pixels}.
        dynamic_shapes: As of ExportSpec.
        draw_inputs: As of ExportSpec.
        name: The package's name. Default: the model's type with `_vision`.

    Raises:
        UsageError: The model does not read features of images in the places of tokens.
    """
    inner = checked_model(model)
    if image_token(inner) is None:
        raise UsageError(
            f"{type(inner).__name__} does not read features of images in the places of tokens",
            hint="Export the module that sees as it is: exportkit.ExportSpec(model=..., example_kwargs=...).",
        )
    return ExportSpec(
        model=ImageFeatures(inner).eval(),
        example_kwargs=inputs,
        dynamic_shapes=dynamic_shapes or {},
        draw_inputs=draw_inputs,
        name=name or f"{getattr(inner.config, 'model_type', 'model')}_vision",
    )
