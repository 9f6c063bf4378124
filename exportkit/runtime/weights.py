"""Weights outside of the compiled code: mapped from the package, or given in their place."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from exportkit.errors import WeightsError
from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Manifest, Target, Weight
from exportkit.package.weight_matching import match_state

Weights = Mapping[str, torch.Tensor]  # by the weights' names in the manifest
WeightsSource = str | os.PathLike[str] | Mapping[str, torch.Tensor]


def mapped_weights(reader: PackageReader) -> dict[str, torch.Tensor]:
    """The weights that some code reads, mapped from the package: nothing is read before it is used.

    Where others may write to the package, they are in a copy that was checked: DigestMismatchError. The tensors may not
    be written to, and keep the file mapped as long as one of them lives.
    """
    weights = [weight for weight in reader.manifest.weights if weight.record is not None]
    if not weights:
        return {}
    mapping = _Mapping(reader)
    return {weight.name: mapping.tensor(weight) for weight in weights}


class _Mapping:
    """An `ek_mapping`, closed once no tensor is left that lies in it."""

    def __init__(self, reader: PackageReader) -> None:
        self._handle = core.handle("ek_package_map", reader.handle)
        weakref.finalize(self, core.library().ek_mapping_close, self._handle).atexit = False  # the process may use it

    def tensor(self, weight: Weight) -> torch.Tensor:
        assert weight.record is not None
        dtype: torch.dtype = getattr(torch, weight.dtype)
        address = core.library().ek_mapping_data(self._handle, core.encoded(weight.record))
        return _over(address, weight.shape, weight.strides, dtype, keep=self)


def constants_of(target: Target, weights: Weights) -> dict[str, torch.Tensor]:
    """What a target's code takes from outside, by AOTInductor's names."""
    return {constant: weights[name] for constant, name in target.constants.items()}


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over another's memory that does not keep it alive."""
    return _over(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, keep=None)


def _over(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, *, keep: object
) -> torch.Tensor:
    """A tensor over dense memory that is somebody else's, which `keep` keeps there."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty_strided(shape, strides, dtype=dtype)
    # Not through torch.from_numpy, which warns of memory that is read-only.
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.keep = keep
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


def replaced_weights(
    manifest: Manifest, targets: Sequence[Target], packaged: Weights, source: WeightsSource
) -> dict[str, torch.Tensor]:
    """The weights of another fine-tune, in memory of their own, in the place of those that the model has.

    `packaged` are the package's, for what stays: constants of the code, and weights that are built into that of one of
    the `targets`. WeightsError: there is no such file, or it does not fit; nothing was changed.
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
    """A state by name; a file's tensors are mapped. WeightsError: it is no safetensors file, or has no tensors."""
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
