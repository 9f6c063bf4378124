"""What commands that speak with registries share: references as arguments, and how registries are reached."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exportkit.cli.shared_options import EXISTING_FILE
from exportkit.errors import UsageError
from exportkit.registry.oci_reference import SCHEME, RegistryReference, parse_reference

if TYPE_CHECKING:
    from exportkit.registry.registry_client import RegistryOptions


class ReferenceType(click.ParamType):
    """oci://host/name:tag@digest."""

    name = "reference"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> RegistryReference:
        """Parses it."""
        try:
            return value if isinstance(value, RegistryReference) else parse_reference(value)
        except UsageError as error:
            self.fail(str(error), parameter, context)


class FileOrReferenceType(ReferenceType):
    """The Path of a file that exists, or a reference."""

    name = "file"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Parses what begins as a reference does."""
        if isinstance(value, (Path, RegistryReference)) or not str(value).startswith(SCHEME):
            return EXISTING_FILE.convert(value, parameter, context)
        return super().convert(value, parameter, context)


REFERENCE = ReferenceType()
FILE_OR_REFERENCE = FileOrReferenceType()


def registry_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--registry-plain-http and --registry-ca: the command gets them as `registry`, a function that makes the options.

    It is a function so that a command that meets no registry needs none of its packages.
    """
    plain = click.option(
        "--registry-plain-http/--no-registry-plain-http",
        "plain_http",
        default=None,
        help="Reach the registry without TLS. Default: only on this machine, such as localhost:5000.",
    )
    authorities = click.option(
        "--registry-ca",
        "authorities",
        type=EXISTING_FILE,
        metavar="CA.pem",
        help="The authority of the registry's certificate, if the system does not know it.",
    )

    @functools.wraps(function)
    def with_registry(*args: Any, plain_http: bool | None, authorities: Path | None, **options: Any) -> Any:
        def made() -> RegistryOptions:
            from exportkit.registry.registry_client import RegistryOptions

            return RegistryOptions(plain_http=plain_http, authorities=authorities)

        return function(*args, registry=made, **options)

    return plain(authorities(with_registry))
