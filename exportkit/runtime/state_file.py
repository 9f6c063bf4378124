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
        raise StateError(
            f"{path} is not a whole safetensors file: {error}", hint="`session.save(path)` writes one."
        ) from error


def _check_identity(path: str | os.PathLike[str], whose: Identity, found: Mapping[str, str]) -> None:
    if _STATE not in found:
        raise StateError(
            f"{path} is no state of a session: it has no {_STATE}", hint="`session.save(path)` writes one."
        )
    for key, wanted in whose.items():
        if found.get(key) != wanted:
            raise StateError(
                f"{path} is a state of another model: {key} is {found.get(key)}, and this model's is {wanted}",
                hint=f"Load a state that a session of this {whose[_MODEL]} saved.",
            )


def _check_tensors(path: str | os.PathLike[str], manifest: Manifest, sizes: Mapping[str, int], file: Any) -> None:
    names, known = set(file.keys()), {each.name for each in manifest.state}
    if names != known:
        raise StateError(f"{path} does not have the tensors of the state: {', '.join(sorted(names ^ known))}")
    for each in manifest.state:
        found = file.get_slice(each.name)
        dtype, shape = SAFETENSORS_DTYPES.get(found.get_dtype(), found.get_dtype()), list(found.get_shape())
        expected = shape_at(each, sizes)
        if (dtype, shape) != (each.dtype, expected):
            raise StateError(
                f"{each.name} in {path} is {dtype}{shape}; this session's is {each.dtype}{expected}",
                hint="A state is loaded into a session of the sizes that it was saved with.",
            )


def identity(reader: PackageReader) -> Identity:
    """Returns whose state a file of this package's sessions is."""
    return {_MODEL: reader.manifest.name, _STATE: core.text("ek_package_state_digest", reader.handle).decode()}
