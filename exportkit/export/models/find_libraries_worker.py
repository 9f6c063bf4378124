"""The child process of `exportkit.export.models.find_libraries`."""

from __future__ import annotations

import socket
from pathlib import Path

from exportkit.child.messages import serve
from exportkit.errors import NotAnOperatorLibraryError
from exportkit.export.models.find_libraries import Import, Loaded
from exportkit.export.models.importing import import_code
from exportkit.export.models.source_lines import users_code
from exportkit.libraries import mapped_beside_torch
from exportkit.package.elf import read_elf


def find(command: Import) -> Loaded:
    """Imports the code and looks which libraries the process has."""
    with users_code(f"importing {command.code}"):
        import_code(command.code)
    return Loaded(tuple(str(path) for path in mapped_beside_torch() if _registers_operators(path)))


def _registers_operators(path: Path) -> bool:
    try:
        return read_elf(path).registers_operators
    except (OSError, NotAnOperatorLibraryError):
        return False


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    serve(connection, {Import: find})
