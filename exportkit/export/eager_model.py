"""Makes the eager model of an artifact again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from exportkit.errors import UsageError
from exportkit.export.placement import parse_floating, prepared
from exportkit.export.resolve import resolve
from exportkit.package.manifest import Call, Source
from exportkit.sizes import shape_at
from exportkit.spec import ExportSpec


@contextmanager
def rebuild_eager(
    model: str,
    source: Source,
    call: Call,
    device: torch.device,
    *,
    weights: Path | None = None,
    op_libraries: Sequence[Path] = (),
) -> Iterator[ExportSpec]:
    """MODEL with the arguments and the seed that it had for an export, cast as it was then, on a device.

    Whether it is the same model still, its `state_sha256` tells.

    Args:
        model: MODEL.
        source: Of the artifact.
        call: Likewise.
        device: Usable here.
        weights: A safetensors file, where it was exported with one.
        op_libraries: Operator libraries that it calls.

    Raises:
        ModelNotFoundError: MODEL names nothing that can be imported here.
        UsageError: The arguments do not fit it any more.
        ExportError: Importing or making it raised.
    """
    arguments: dict[str, Any] = {
        "model_kwargs": source.model_kwargs,
        "weights": weights,
        "op_libraries": op_libraries,
        "seed": source.seed,
    }
    try:
        resolved = resolve(model, **arguments)
    except UsageError:
        # A bare module has no inputs of its own: it was exported with --input, and gets the same again.
        resolved = resolve(model, inputs=input_texts(call), **arguments)
    with prepared(resolved.spec, device, parse_floating(source.dtype)) as spec:
        yield spec


def input_texts(call: Call) -> list[str]:
    """The tensors of a call as --input has them, for parameters that are one tensor each."""
    # Their values are what inputs of other sizes are drawn from, so there should be some.
    sizes = {dimension.name: min(max(dimension.min, 8), dimension.max) for dimension in call.dimensions}
    return [
        f"{tensor.name}={tensor.dtype}{shape_at(tensor, sizes)}" for tensor in call.inputs if "." not in tensor.name
    ]
