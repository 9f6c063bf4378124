"""The child process of `exportkit.child.probe`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from exportkit.child.messages import serve
from exportkit.child.probe import Kernels, Probe, Probed, Registrations
from exportkit.errors import LibraryLoadError
from exportkit.schema_text import schema_text

_KERNELS: Mapping[str, Kernels] = {
    "CPU": "cpu",
    "CUDA": "cuda",
    "CompositeExplicitAutograd": "any",
    "CompositeImplicitAutograd": "any",
}


def probe(command: Probe) -> Probed:
    """Loads the libraries."""
    return Probed(tuple(map(_registrations, command.libraries)))


def _registrations(library: str) -> Registrations:
    """Loads a library and compares what is registered before and after."""
    schemas_before, kernels_before = _schemas(), _kernels()
    try:
        torch.ops.load_library(library)
    except OSError as error:
        reason = str(error.__cause__ or error)
        raise LibraryLoadError(f"the dynamic linker refused {Path(library).name}: {reason}") from error
    defines = {name: schema for name, schema in _schemas().items() if schemas_before.get(name) != schema}
    adds: dict[str, tuple[Kernels, ...]] = {}
    for key, name in sorted(_kernels() - kernels_before):
        adds[name] = tuple(sorted({*adds.get(name, ()), _KERNELS[key]}))
    return Registrations(defines, adds)


def _schemas() -> dict[str, str]:
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        found[f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name] = schema_text(schema)
    return found


def _kernels() -> set[tuple[str, str]]:
    return {(key, name) for key in _KERNELS for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    serve(connection, {Probe: probe})
