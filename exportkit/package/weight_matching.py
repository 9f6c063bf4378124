"""Weights that lie outside of the compiled code, and what may take their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from exportkit.package import core
from exportkit.package.manifest import Weight

WEIGHTS_DIR = "data/weights"

# Made at import: exportkit.package.manifest says why.
_NAMES = msgspec.json.Decoder(dict[str, list[str]])


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
    tensors = [{"name": name, "dtype": dtype, "shape": tuple(shape)} for name, (dtype, shape) in given.items()]
    answer = core.text("ek_match_state", msgspec.json.encode(weights), msgspec.json.encode(tensors))
    return _NAMES.decode(answer)
