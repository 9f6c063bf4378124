"""Weights outside of the compiled code: mapped from the package, or given in their place."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from exportkit.errors import WeightsError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Manifest, Target, Weight
from exportkit.package.weights import match_state, weight_bytes

Weights = Mapping[str, torch.Tensor]  # by the weights' names in the manifest
WeightsSource = str | os.PathLike[str] | Mapping[str, torch.Tensor]


def mapped_weights(reader: PackageReader) -> dict[str, torch.Tensor]:
    """The weights that some code reads, mapped from the package: nothing is read before it is used.

    The tensors may not be written to, and keep the file mapped as long as one of them lives.
    """
    file = _whole_file(reader.fileno())
    return {weight.name: _in_file(file, reader, weight) for weight in reader.manifest.weights if weight.record}


def constants_of(target: Target, weights: Weights) -> dict[str, torch.Tensor]:
    """What a target's code takes from outside, by AOTInductor's names."""
    return {constant: weights[name] for constant, name in target.constants.items()}


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over another's memory that does not keep it alive."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _whole_file(fd: int) -> torch.Tensor:
    """The bytes of a file, mapped read-only: code that should write to a weight gets a fault, and nobody another one.

    Not through torch.from_numpy, which warns of memory that is read-only.
    """
    mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    kind: Any = type("Mapped", (ctypes.Array,), {"_type_": ctypes.c_uint8, "_length_": len(mapping)})
    array = kind.from_address(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
    array.mapping = mapping  # lives as long as the array does, which the tensor keeps
    return torch.frombuffer(array, dtype=torch.uint8)


def _in_file(file: torch.Tensor, reader: PackageReader, weight: Weight) -> torch.Tensor:
    assert weight.record is not None
    start = reader.data_offset(weight.record)
    return file[start : start + weight_bytes(weight)].view(_dtype(weight)).as_strided(weight.shape, weight.strides)


def replaced_weights(
    manifest: Manifest, targets: Sequence[Target], packaged: Weights, source: WeightsSource
) -> dict[str, torch.Tensor]:
    """The weights of another fine-tune, in memory of their own, in the place of those that the model has.

    Args:
        manifest: Of the package.
        targets: Those whose code is to run with them.
        packaged: The package's, for what stays: constants of the code, and weights that are built into it.
        source: The other state, as a safetensors file or as tensors by name.

    Raises:
        WeightsError: There is no such file, or it does not fit; nothing was changed.
    """
    given = read_state(source)
    names = match_state(manifest.weights, described(given))
    weights = dict(packaged)
    for weight in manifest.weights:
        if not weight.state:
            continue
        first, *others = names[weight.name]
        if differing := next((name for name in others if not _same_content(given[first], given[name])), None):
            raise WeightsError(
                f"{first} and {differing} differ; they are one tensor in the model",
                hint="Export the model again with its weights untied, or give one of the two.",
            )
        if weight.record is None:
            continue
        inside = [target.name for target in targets if weight.name not in target.constants.values()]
        if inside and not _same_content(given[first], packaged[weight.name]):
            raise WeightsError(
                f"{weight.name} differs from the package's, which is built into the code of target {inside[0]}",
                hint="Export the model with these weights.",
            )
        weights[weight.name] = _laid_out(given[first], weight)
    return weights


def read_state(source: WeightsSource) -> dict[str, torch.Tensor]:
    """A state by name; a file's tensors are mapped.

    Raises:
        WeightsError: It is no safetensors file, or no mapping of names to tensors.
    """
    if isinstance(source, Mapping):
        for name, tensor in source.items():
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
                raise WeightsError(f"{name} is no tensor with data: {type(tensor).__name__}")
        return {name: tensor.detach() for name, tensor in source.items()}
    # Imported here, since most processes that load a package never swap weights.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(source, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except OSError as error:
        raise WeightsError(f"cannot read the weights {source}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise WeightsError(f"{source} is no safetensors file: {error}") from error


def described(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Size]]:
    """dtype, as the manifest has it, and shape of each tensor."""
    return {name: (str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in state.items()}


def _same_content(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bytes."""
    return torch.equal(*(tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _laid_out(tensor: torch.Tensor, weight: Weight) -> torch.Tensor:
    """A copy with the strides that the code was compiled for."""
    return torch.empty_strided(weight.shape, weight.strides, dtype=tensor.dtype).copy_(tensor)


def _dtype(weight: Weight) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, weight.dtype)
    return dtype
