"""`exportkit ops`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import click

from exportkit.cli.app import SETTINGS, LazyGroup


class OperatorCommands(LazyGroup):
    """The commands for operators and their libraries."""

    modules: ClassVar[Mapping[str, str]] = {
        "new": "ops_new",
        "list": "ops_list",
        "check": "ops_check",
    }


@click.group("ops", cls=OperatorCommands, context_settings=SETTINGS)
def command() -> None:
    """Write, list and check custom operators."""
