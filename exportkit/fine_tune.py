"""Replaces the weights of a package. Its compiled targets stay the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from exportkit.errors import WeightsError
from exportkit.export.record.cases import digest_of_state
from exportkit.export.record.host_copies import elements
from exportkit.package.archive import Content, PackageReader
from exportkit.package.consistency import WEIGHTS_DIR, match_state
from exportkit.package.manifest import Manifest
from exportkit.package.weights_hints import advised
from exportkit.runtime.weights import described, read_state, replaced_weights


def replace_weights(reader: PackageReader, manifest: Manifest, records: dict[str, Content], weights: Path) -> Manifest:
    """Replaces the weights in a manifest and in its records, and removes the cases and the program.

    Args:
        reader: The package, which has the old weights.
        manifest: Its manifest, perhaps with fewer targets.
        records: The records, which are changed.
        weights: A safetensors file with the model's whole state.

    Raises:
        WeightsError: The weights do not fit the model, or the package's weights are inside the compiled code.
    """
    if not any(weight.state for weight in manifest.weights):
        raise WeightsError(
            f"{reader.path.name} has no weights outside its compiled code",
            hint="Export the model with these weights and without --embed-weights.",
        )
    state = read_state(weights)
    with advised(weights, [weight.name for weight in manifest.weights if weight.state], state):
        replaced = replaced_weights(reader, manifest, manifest.targets, state)
    old = {weight.record for weight in manifest.weights} | {case.record for case in manifest.cases}
    old |= set(manifest.program.records.values()) if manifest.program else set()
    for name in old - {None}:
        records.pop(str(name), None)
    listed = []
    for weight in manifest.weights:
        if weight.record is not None:
            content = elements(replaced[weight.name])
            weight = msgspec.structs.replace(weight, record=f"{WEIGHTS_DIR}/{hashlib.sha256(content).hexdigest()}")
            records[str(weight.record)] = content
        listed.append(weight)
    source = msgspec.structs.replace(manifest.source, state_sha256=digest_of_state(whole_state(manifest, state)))
    return msgspec.structs.replace(manifest, weights=tuple(listed), cases=(), program=None, source=source)


def whole_state(manifest: Manifest, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the model's state with a tied weight under each of its names, of which `state` may have one only.

    Raises:
        WeightsError: The state does not fit the manifest's weights.
    """
    given = match_state(manifest.weights, described(state), manifest.state)
    whole: dict[str, torch.Tensor] = {}
    for weight in manifest.weights:
        if weight.state:
            whole |= dict.fromkeys((weight.name, *weight.aliases), state[given[weight.name][0]])
    return whole
