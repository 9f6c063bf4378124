"""The methods of a package that a client may know of, where its API key is for some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from exportkit.serve.protocol.datatypes import shown
from exportkit.serve.statuses import NotServedError
from exportkit.serve.tenants.key_rules import KeyRules

if TYPE_CHECKING:
    from exportkit.serve.engine.served_package import Named


def sees_model(rules: KeyRules, model: Named) -> bool:
    """Whether a client may know of a model."""
    return rules.sees(model.name if model.package is None else model.package.name, model.name)


def check_method(rules: KeyRules, model: Named, method: str | None) -> None:
    """Refuses a method that a request names, and that the client may not know of.

    Raises:
        NotServedError: Whether there is one or not.
    """
    if rules.models is None or method is None:
        return
    package = model.package
    served = None if package is None else package.models.get(method)
    if package is not None and (
        rules.sees(package.name, package.name) or (served is not None and rules.sees(package.name, served.name))
    ):
        return
    raise NotServedError(f"the method {shown(method)} of {model.name} is not served")


def without_hidden_methods(rules: KeyRules, model: Named, metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns a model's metadata, or its configuration, without methods that the client may not know of."""
    package = (model.package or model).name
    if rules.models is None or rules.sees(package, package):
        return metadata

    def shown_methods(methods: dict[str, Any]) -> dict[str, Any]:
        return {
            name: each
            for name, each in methods.items()
            if each["served_as"] is not None and rules.sees(package, each["served_as"])
        }

    if "methods" in metadata:
        metadata = {**metadata, "methods": shown_methods(metadata["methods"])}
    parameters = metadata.get("parameters", {})
    if "methods" in parameters:
        found = shown_methods(msgspec.json.decode(parameters["methods"]["string_value"]))
        text = {"string_value": msgspec.json.encode(found).decode()}
        metadata = {**metadata, "parameters": {**parameters, "methods": text}}
    return metadata
