"""What a request to load a model may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from exportkit.serve.statuses import BadRequestError

# The part of Triton's ModelConfig that can be given.
_Text = dict[Literal["string_value"], str]
_CONFIG = msgspec.json.Decoder(dict[Literal["parameters"], dict[Literal["weights"], _Text]])


def weights_of(parameters: Mapping[str, Any]) -> str | None:
    """Returns the name of the weights that a request asks for; None for the package's.

    Triton's clients can give no other parameter than `config`, so the name may be there, too: as text of a ModelConfig
    with `{"parameters": {"weights": {"string_value": "tuned.safetensors"}}}`.

    Raises:
        BadRequestError: Something else is asked for.
    """
    for name in parameters:
        if name.startswith("file:"):
            raise BadRequestError(
                "a model is not loaded from a request: it would be code of a stranger",
                hint="Put the package into the model repository.",
            )
        if name not in ("weights", "config"):
            raise BadRequestError(f"`{name}` is not a parameter of loading", hint="`weights` is.")
    if len(parameters) > 1:
        raise BadRequestError("`weights` and `config` were both given", hint="Give one of them.")
    weights = parameters.get("weights")
    if "config" in parameters:
        weights = _weights_in(parameters["config"])
    if weights is not None and not isinstance(weights, str):
        raise BadRequestError(f"`weights` must be the name of a file, got {weights!r}")
    return weights


def _weights_in(config: Any) -> str:
    try:
        found = _CONFIG.decode(config if isinstance(config, (str, bytes)) else b"null")
        return found["parameters"]["weights"]["string_value"]
    except (msgspec.DecodeError, UnicodeError, KeyError) as error:
        raise BadRequestError(
            f"the configuration of a model comes from its package, but for the weights: {error}",
            hint='It may be {"parameters": {"weights": {"string_value": "<file>.safetensors"}}}.',
        ) from error
