"""Matches a package's weights with the tensors that replace them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from exportkit.package import core
from exportkit.package.manifest import Weight

WEIGHTS_DIR = "data/weights"

# Made at import: exportkit.package.manifest says why.
_NAMES = msgspec.json.Decoder(dict[str, list[str]])


def match_state(weights: Sequence[Weight], given: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, list[str]]:
    """Finds each weight of the state among the tensors of another fine-tune.

    Args:
        weights: The manifest's weights.
        given: The dtype and shape of each tensor, by name. A tied weight may have any of its names.

    Returns:
        For each weight, its names among the given tensors; at least one.

    Raises:
        WeightsError: Tensors are missing, unknown, or have the wrong dtype or shape. The message lists all of them.
    """
    tensors = [{"name": name, "dtype": dtype, "shape": tuple(shape)} for name, (dtype, shape) in given.items()]
    answer = core.text("ek_match_state", msgspec.json.encode(weights), msgspec.json.encode(tensors))
    return _NAMES.decode(answer)
