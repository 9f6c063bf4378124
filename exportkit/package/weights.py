"""Weights that lie outside of the compiled code: what a manifest may say of them, and what may take their place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from exportkit.errors import ManifestConsistencyError, WeightsError
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


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these strides address as many places as there are elements, from the first on, each once."""
    if 0 in shape:
        return True
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape) if size > 1):
        if stride != step:
            return False
        step *= size
    return True


def match_state(weights: Sequence[Weight], given: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, list[str]]:
    """Finds every weight of the state among the tensors of another fine-tune of the model.

    Args:
        weights: Of the manifest.
        given: dtype and shape of the tensors, by name. A tied weight may be there under any of its names.

    Returns:
        The names under which each weight is given, at least one.

    Raises:
        WeightsError: Some are missing, are not of the model, or have another dtype or shape; the message has them all.
    """
    state = {weight.name: (weight.name, *weight.aliases) for weight in weights if weight.state}
    expected = {name: weight for weight in weights if weight.state for name in (weight.name, *weight.aliases)}
    missing = [" or ".join(names) for names in state.values() if not given.keys() & set(names)]
    unexpected = [name for name in given if name not in expected]
    other = [
        f"{name} is {dtype}{list(shape)}, not {expected[name].dtype}{list(expected[name].shape)}"
        for name, (dtype, shape) in given.items()
        if name in expected and (dtype, tuple(shape)) != (expected[name].dtype, expected[name].shape)
    ]
    faults = {"missing": missing, "not of the model": unexpected, "of another kind": other}
    if any(faults.values()):
        raise WeightsError(
            "the weights do not fit the model"
            + "".join(f"\n  {what}: {', '.join(names)}" for what, names in faults.items() if names),
            hint="Give all of the model's state_dict, with its names, dtypes and shapes; of tied names, one will do.",
        )
    return {weight: [name for name in names if name in given] for weight, names in state.items()}


def _check_layout(weight: Weight) -> None:
    """The strides address every element of the record once: nothing is read outside of it."""
    if weight.dtype not in ITEM_BYTES:
        raise ManifestConsistencyError(f"weight {weight.name} has the unknown dtype {weight.dtype!r}")
    if len(weight.strides) != len(weight.shape):
        raise ManifestConsistencyError(
            f"weight {weight.name} has {len(weight.strides)} strides for {len(weight.shape)} dimensions"
        )
    if not is_dense(weight.shape, weight.strides):
        raise ManifestConsistencyError(
            f"weight {weight.name} of shape {list(weight.shape)} has the strides {list(weight.strides)}, which "
            "leave gaps or overlap"
        )


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
