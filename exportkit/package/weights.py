"""Weights that lie outside of the compiled code: what a manifest may say of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from exportkit.errors import ManifestConsistencyError
from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Manifest, Target, Weight

WEIGHTS_DIR = "data/weights"


def check_weights(manifest: Manifest) -> None:
    """Checks what a manifest says of its weights; no record is looked at.

    Raises:
        ManifestConsistencyError: It contradicts itself; the message names the weight.
    """
    sizes = {record.name: record.size for record in manifest.records}
    weights = {weight.name: weight for weight in manifest.weights}
    seen: set[str] = set()
    for weight in manifest.weights:
        for name in (weight.name, *weight.aliases):
            if name in seen:
                raise ManifestConsistencyError(f"weight {name} is there twice")
            seen.add(name)
        _check_layout(weight)
        if weight.record is not None:
            _check_record(weight, weight.record, sizes)
    for target in manifest.targets:
        _check_constants(target, weights)


def weight_bytes(weight: Weight) -> int:
    """How many bytes its record has."""
    # A 0 first: a product of thousands of large sizes takes minutes, whatever comes of it in the end.
    return 0 if 0 in weight.shape else math.prod(weight.shape) * ITEM_BYTES[weight.dtype]


def _check_layout(weight: Weight) -> None:
    """The strides address every element of the record once: nothing is read outside of it."""
    if weight.dtype not in ITEM_BYTES:
        raise ManifestConsistencyError(f"weight {weight.name} has the unknown dtype {weight.dtype!r}")
    if len(weight.strides) != len(weight.shape):
        raise ManifestConsistencyError(
            f"weight {weight.name} has {len(weight.strides)} strides for {len(weight.shape)} dimensions"
        )
    if 0 in weight.shape:
        return
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(weight.strides, weight.shape) if size > 1):
        if stride != step:
            raise ManifestConsistencyError(
                f"weight {weight.name} of shape {list(weight.shape)} has the strides {list(weight.strides)}, which "
                "leave gaps or overlap"
            )
        step *= size


def _check_record(weight: Weight, record: str, sizes: Mapping[str, int]) -> None:
    if record not in sizes:
        raise ManifestConsistencyError(f"weight {weight.name}: there is no record {record!r}")
    if not record.startswith(f"{WEIGHTS_DIR}/"):
        raise ManifestConsistencyError(f"weight {weight.name}: {record} is not under {WEIGHTS_DIR}/")
    if sizes[record] != weight_bytes(weight):
        raise ManifestConsistencyError(
            f"weight {weight.name} is {weight.dtype}{list(weight.shape)}, {weight_bytes(weight)} bytes; its record "
            f"{record} has {sizes[record]}"
        )


def _check_constants(target: Target, weights: Mapping[str, Weight]) -> None:
    for constant, name in target.constants.items():
        if name not in weights:
            raise ManifestConsistencyError(f"target {target.name} takes {constant} from {name!r}, which is no weight")
        if weights[name].record is None:
            raise ManifestConsistencyError(f"target {target.name} takes {constant} from {name}, which has no record")
