"""The child process of `exportkit.export.models.find_libraries`."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from exportkit.child.messages import serve
from exportkit.errors import NotAnOperatorLibraryError
from exportkit.export.models.find_libraries import Import, Loaded
from exportkit.export.models.importing import import_code
from exportkit.export.models.source_lines import users_code
from exportkit.libraries import mapped_files
from exportkit.package.elf import read_elf


def find(command: Import) -> Loaded:
    """Imports the code and looks which libraries the process has."""
    with users_code(f"importing {command.code}"):
        import_code(command.code)
    torch_folder = Path(torch.__file__).parent
    files = [path for path, _ in mapped_files() if not path.is_relative_to(torch_folder)]
    return Loaded(tuple(str(path) for path in files if _registers_operators(path)))


def _registers_operators(path: Path) -> bool:
    try:
        return read_elf(path).registers_operators
    except (OSError, NotAnOperatorLibraryError):
        return False


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    serve(connection, {Import: find})
