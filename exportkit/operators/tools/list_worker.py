"""The child process of `exportkit.operators.tools.listing`."""

from __future__ import annotations

import socket
from pathlib import Path

from exportkit.child.messages import serve
from exportkit.errors import NotAnOperatorLibraryError
from exportkit.libraries import mapped_beside_torch
from exportkit.operators.contract.schema_rules import schema_findings
from exportkit.operators.tools.listing import Listed, ListedOperator, ListSource
from exportkit.operators.tools.registered import (
    autocast_of,
    devices_of,
    fake_of,
    gradient_of,
    has_schema,
    is_python,
    newly_registered,
    overload,
)
from exportkit.operators.tools.source import load
from exportkit.package.elf import read_elf
from exportkit.schema_text import schema_text


def describe(command: ListSource) -> Listed:
    """Loads the operators and describes them."""
    with newly_registered() as registered:
        load(command.source)
        names = registered()
    operators = tuple(_operator(name) for name in names if has_schema(name))
    files = [str(path) for path in mapped_beside_torch() if registers_operators(path)]
    return Listed(operators, tuple(files))


def _operator(name: str) -> ListedOperator:
    schema = overload(name)._schema
    return ListedOperator(
        name=name,
        schema=schema_text(schema),
        devices=devices_of(name),
        in_python=is_python(name),
        fake=fake_of(name),
        gradient=gradient_of(name),
        autocast=autocast_of(name),
        objections=schema_findings(schema),
    )


def registers_operators(path: Path) -> bool:
    """Whether a mapped file is a library that registers operators."""
    try:
        return read_elf(path).registers_operators
    except (OSError, NotAnOperatorLibraryError):
        return False


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    serve(connection, {ListSource: describe})
