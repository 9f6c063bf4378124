"""Saved states of sessions: safetensors files with metadata that says which model's state it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from exportkit.errors import StateError
from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import check_writable, temporary_folder, write_whole
from exportkit.package.consistency import STATE_OWNER
from exportkit.package.dtypes import SAFETENSORS_DTYPES
from exportkit.package.manifest import Manifest

Identity = dict[str, str]  # the metadata that says whose state a file is

_MODEL, _STATE = STATE_OWNER, "exportkit.state"
_SAVED = "Give a file that a session's save wrote."


def write_state(path: str | os.PathLike[str], whose: Identity, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a state that only its owner may read. Raises UsageError if the folder cannot be written to."""
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
    path: str | os.PathLike[str],
    reader: PackageReader,
    sizes: Mapping[str, int],
    part: Literal["whole", "part", "row"] = "whole",
) -> dict[str, torch.Tensor]:
    """Reads the state of a session of these sizes, or a part of it, on the CPU, by name and in order.

    A file has the whole state, as a session saved it, or what it names, for all rows or one: csrc/package/state_files.h
    has the rules. A value without the state's rows is every row's.

    Raises:
        StateError: The file cannot be read, or its state is another model's or of other sizes.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {
                reader.manifest.state[value.index].name: _value(file, value, reader.manifest)
                for value in _matched(path, reader, sizes, part, file)
            }
    except OSError as error:
        raise StateError(f"cannot read the state {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise StateError(f"{path} is not a safetensors file: {error}", hint=_SAVED) from error


class _Value(msgspec.Struct, frozen=True):
    """`StateValue` of csrc/package/state_files.h."""

    index: int
    tensor: str | None
    scale: float
    shape: tuple[int, ...]


def _matched(
    path: str | os.PathLike[str], reader: PackageReader, sizes: Mapping[str, int], part: str, file: Any
) -> list[_Value]:
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is not a mapping)
    tensors = [
        {"name": name, "dtype": SAFETENSORS_DTYPES.get(each.get_dtype(), each.get_dtype()), "shape": each.get_shape()}
        for name, each in slices.items()
    ]
    given = {"path": os.fspath(path), "metadata": file.metadata() or {}, "tensors": tensors}
    said = core.text(
        "ek_package_match_state_file",
        reader.handle,
        msgspec.json.encode(given),
        msgspec.json.encode(dict(sizes)),
        ("whole", "part", "row").index(part),
    )
    return msgspec.json.decode(said, type=list[_Value])


def _value(file: Any, value: _Value, manifest: Manifest) -> torch.Tensor:
    """Returns the file's numbers, scaled, in the state's dtype, with zeros behind them."""
    whole = torch.zeros(value.shape, dtype=getattr(torch, manifest.state[value.index].dtype))
    if value.tensor is not None:
        read: torch.Tensor = file.get_tensor(value.tensor)
        wide = torch.promote_types(read.dtype, torch.float32)
        scaled = read if value.scale == 1 else read.to(wide) * value.scale
        whole[tuple(slice(size) for size in read.shape)] = scaled
    return whole


def identity(reader: PackageReader) -> Identity:
    """Returns whose state a file of this package's sessions is."""
    return {_MODEL: reader.manifest.name, _STATE: core.text("ek_package_state_digest", reader.handle).decode()}
