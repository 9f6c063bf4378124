"""Weights outside the compiled code: mapped from the package, or replaced. And what a state begins with."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exportkit.errors import ManifestConsistencyError, WeightsError
from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.consistency import match_state
from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Manifest, Size, StateTensor, Target, Weight
from exportkit.package.weights_hints import advised, to_safetensors
from exportkit.runtime.native import use_native
from exportkit.tensor_bytes import tensor_bytes

Weights = Mapping[str, torch.Tensor]  # by the weights' names in the manifest
WeightsSource = str | os.PathLike[str] | Mapping[str, torch.Tensor]


def mapped_weights(reader: PackageReader) -> dict[str, torch.Tensor]:
    """Maps the weights from the package, so that they are read from disk on first use. The tensors are read-only.

    If others may write to the package, the weights come from a copy, which is checked: DigestMismatchError. The tensors
    keep the file mapped.
    """
    weights = [weight for weight in reader.manifest.weights if weight.record is not None]
    if not weights:
        return {}
    mapping = _Mapping(reader)
    return {weight.name: mapping.tensor(weight) for weight in weights}


class _Mapping:
    """An `ek_mapping`. It is closed when its last tensor is gone."""

    def __init__(self, reader: PackageReader) -> None:
        self._handle = core.handle("ek_package_map", reader.handle)
        weakref.finalize(self, core.library().ek_mapping_close, self._handle).atexit = False  # the process may use it

    def tensor(self, weight: Weight) -> torch.Tensor:
        assert weight.record is not None
        dtype: torch.dtype = getattr(torch, weight.dtype)
        address = core.library().ek_mapping_data(self._handle, core.encoded(weight.record))
        return _over(address, weight.shape, weight.strides, dtype, keep=self)


def constants_of(target: Target, method: str, weights: Weights) -> dict[str, torch.Tensor]:
    """Returns the external constants of the code of a target's method, by AOTInductor's names."""
    return {constant: weights[name] for constant, name in target.constants[method].items()}


def on_device(target: Target, weights: Weights, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the weights that a target's methods take, on the device of their code.

    On the CPU, these are the given tensors. On a GPU they are one copy for all methods and runners. Its memory is free
    again when the last of them is gone: `released`.
    """
    used = {name: weights[name] for constants in target.constants.values() for name in constants.values()}
    if device.type == "cpu":
        return used
    if use_native():
        return dict(zip(used, torch.ops.exportkit.copied_together.default(list(used.values()), device), strict=True))
    copies = {name: weight.to(device) for name, weight in used.items()}
    torch.cuda.synchronize(device)  # calls do not wait for the stream that copies
    return copies


def released(weights: Weights, device: torch.device) -> None:
    """Waits until the device has finished with weights that are given back.

    torch gives their memory to the next that asks, on whatever stream the last calls' kernels still read it.
    """
    if weights and device.type != "cpu":
        torch.cuda.synchronize(device)


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory that does not keep the memory alive."""
    if tensor.device.type == "cpu":
        return _over(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, keep=None)
    # `storage` owns nothing: torch's own CUDA graphs make their tensors in this way.
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def _over(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, *, keep: object
) -> torch.Tensor:
    """Returns a tensor over existing dense memory. The tensor holds `keep`, which keeps the memory alive."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty_strided(shape, strides, dtype=dtype)
    # torch.from_numpy would warn that the memory is read-only.
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.keep = keep
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


def replaced_weights(
    reader: PackageReader, manifest: Manifest, targets: Sequence[Target], source: WeightsSource
) -> dict[str, torch.Tensor]:
    """Returns the model's weights with those of another fine-tune, copied to new memory, for these targets.

    For a GPU, a file's are not copied where its layout is the code's: `on_device` reads them through its mapping. The
    manifest is the package's, perhaps with fewer targets.

    Raises:
        WeightsError: The weights cannot be read or do not fit, one differs from the value that is built into the code
            of a target, or they come with other state than sessions begin with.
    """
    given = read_state(source)
    path = None if isinstance(source, Mapping) else Path(source)
    with advised(path, [weight.name for weight in manifest.weights if weight.state], given):
        names = match_state(manifest.weights, described(given), manifest.state)
    check_given_state(reader, given)
    packaged = mapped_weights(reader)
    mapped = path is not None and all(target.device != "cpu" for target in targets)
    weights = dict(packaged)
    for weight in manifest.weights:
        if not weight.state:
            continue
        first, *others = names[weight.name]
        if differing := next((name for name in others if not same_content(given[first], given[name])), None):
            said = f"{first} and {differing} differ; they are one tensor in the model"
            raise WeightsError(said, hint="Export the model again with untied weights, or give only one of the two.")
        if weight.record is None:
            continue
        inside = [
            target.name
            for target in targets
            if not any(weight.name in constants.values() for constants in target.constants.values())
        ]
        if inside and not same_content(given[first], packaged[weight.name]):
            said = f"{weight.name} differs from the package's, which is built into the code of target {inside[0]}"
            raise WeightsError(said, hint="Export the model with these weights.")
        tensor = given[first]
        weights[weight.name] = tensor if mapped and tensor.stride() == weight.strides else _laid_out(tensor, weight)
    return weights


def read_state(source: WeightsSource) -> dict[str, torch.Tensor]:
    """Returns tensors by name. A file's tensors are mapped. Raises WeightsError if the source is invalid."""
    if isinstance(source, Mapping):
        for name, tensor in source.items():
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
                raise WeightsError(f"{name} is not a tensor with data: {type(tensor).__name__}")
        return {name: tensor.detach() for name, tensor in source.items()}
    # Imported here, because most processes never swap weights.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(source, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a mapping)
    except OSError as error:
        raise WeightsError(f"cannot read the weights {source}: {error.strerror or error}") from error
    except SafetensorError as error:
        hint = to_safetensors(Path(source))
        raise WeightsError(f"{source} is not a safetensors file: {error}", hint=hint) from error


def described(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Size]]:
    """Returns the dtype, spelled as in the manifest, and the shape of each tensor."""
    return {name: (str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in state.items()}


def _laid_out(tensor: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Copies a tensor with the strides that the code was compiled for."""
    return torch.empty_strided(weight.shape, weight.strides, dtype=tensor.dtype).copy_(tensor)


def initial_values(reader: PackageReader, state: StateTensor) -> torch.Tensor | None:
    """Returns what a tensor of the state begins with, on the CPU: one row where rows are alike; None for zeros.

    ManifestConsistencyError: the record has another size.
    """
    if state.initial is None:
        return None
    content = bytearray(reader.read(state.initial))
    shape = [1 if isinstance(size, Size) else size for size in state.shape]
    if len(content) != math.prod(shape) * ITEM_BYTES[state.dtype]:
        raise ManifestConsistencyError(f"{state.initial} has {len(content)} bytes, which {state.name} does not")
    dtype: torch.dtype = getattr(torch, state.dtype)
    flat = torch.frombuffer(content, dtype=torch.uint8).view(dtype) if content else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def check_given_state(reader: PackageReader, given: Mapping[str, torch.Tensor]) -> None:
    """Checks tensors that come with other weights and have the names of the package's state.

    Sessions keep beginning as the package says. So what would be ignored is a WeightsError, unless it says the same, in
    any number of rows.
    """
    names = {name: state for state in reader.manifest.state for name in (state.name, *state.aliases)}
    if other := [name for name in sorted(names.keys() & given) if not _begins(reader, names[name], given[name])]:
        raise WeightsError(
            f"the weights come with state that sessions do not begin with: {', '.join(other)}",
            hint="Leave it out: sessions begin as the model was exported. To begin with other state, export it again.",
        )


def _begins(reader: PackageReader, state: StateTensor, given: torch.Tensor) -> bool:
    sizes = [(size, wanted) for size, wanted in zip(given.shape, state.shape) if not isinstance(wanted, Size)]
    if given.dim() != len(state.shape) or any(size != wanted for size, wanted in sizes):
        return False
    if str(given.dtype).removeprefix("torch.") != state.dtype:
        return False
    first = initial_values(reader, state)
    return same_content(given, torch.zeros_like(given) if first is None else first.expand(given.shape))


def same_content(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same dtype and shape have the same bytes."""
    return torch.equal(*(tensor_bytes(tensor.cpu()) for tensor in (one, other)))
