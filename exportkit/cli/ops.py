"""`exportkit ops`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from exportkit.cli.app import LazyGroup, command_group


class OperatorCommands(LazyGroup):
    """The commands for operators and their libraries."""

    modules: ClassVar[Mapping[str, str]] = {
        "new": "ops_new",
        "build": "ops_build",
        "list": "ops_list",
        "check": "ops_check",
    }


@command_group("ops", cls=OperatorCommands, short_help="Write, build, list and check custom operators.")
def command() -> None:
    """Write, build, list and check custom operators."""
