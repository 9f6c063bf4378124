"""Saved states of sessions: safetensors files with metadata that says which model's state it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exportkit.errors import StateError
from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import check_writable, temporary_folder, write_whole
from exportkit.package.dtypes import SAFETENSORS_DTYPES
from exportkit.package.manifest import Manifest
from exportkit.sizes import shape_at

Identity = dict[str, str]  # the metadata that says whose state a file is

_MODEL, _STATE = "exportkit.model", "exportkit.state"
_SAVED = "Give a file that a session's save wrote."


def write_state(path: str | os.PathLike[str], whose: Identity, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a state that only its owner may read.

    Raises:
        UsageError: The folder cannot be written to.
        OSError: The disk is full.
    """
    from safetensors.torch import save  # most processes never save a state

    path = Path(path)
    check_writable(path)
    content = save({name: tensor.cpu() for name, tensor in tensors.items()}, metadata=whose)
    # What a model remembers may be private: nobody else can open the file before it has its mode.
    with temporary_folder(path.parent, ".exportkit-state") as private:
        written = private / path.name
        write_whole(written, content)
        written.chmod(0o600)
        written.replace(path)


def read_state(
    path: str | os.PathLike[str], whose: Identity, manifest: Manifest, sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Reads the state of a session of these sizes, on the CPU.

    Raises:
        StateError: The file cannot be read, or its state is another model's or of other sizes.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            _check_identity(path, whose, file.metadata() or {})
            _check_tensors(path, manifest, sizes, file)
            return {each.name: file.get_tensor(each.name) for each in manifest.state}
    except OSError as error:
        raise StateError(f"cannot read the state {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise StateError(f"{path} is not a safetensors file: {error}", hint=_SAVED) from error


def _check_identity(path: str | os.PathLike[str], whose: Identity, found: Mapping[str, str]) -> None:
    name = whose[_MODEL]
    if not whose.keys() <= found.keys():
        raise StateError(f"{path} does not say which model's state it has", hint=_SAVED)
    if found[_MODEL] != name:
        raise StateError(f"{path} has the state of the model {found[_MODEL]!r}; this is {name}")
    if found[_STATE] != whose[_STATE]:
        raise StateError(
            f"{path} has the state of another {name}: the names, dtypes or shapes differ",
            hint="Load it with the package whose session saved it.",
        )


def _check_tensors(path: str | os.PathLike[str], manifest: Manifest, sizes: Mapping[str, int], file: Any) -> None:
    given = set(file.keys())
    for each in manifest.state:
        if each.name not in given:
            raise StateError(f"{path} has no tensor {each.name}")
        found = file.get_slice(each.name)
        dtype, shape = SAFETENSORS_DTYPES.get(found.get_dtype(), found.get_dtype()), list(found.get_shape())
        expected = shape_at(each, sizes)
        if (dtype, shape) != (each.dtype, expected):
            raise StateError(
                f"{path}: {each.name} is {dtype}{shape}; the session's is {each.dtype}{expected}",
                hint="A session takes the state of one with the same sizes.",
            )
    if unknown := sorted(given - {each.name for each in manifest.state}):
        raise StateError(f"{path} has the tensor {unknown[0]!r}, which is not in the state of {manifest.name}")


def identity(reader: PackageReader) -> Identity:
    """Returns whose state a file of this package's sessions is."""
    return {_MODEL: reader.manifest.name, _STATE: core.text("ek_package_state_digest", reader.handle).decode()}
