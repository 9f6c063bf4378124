"""What the state of every session begins with."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from exportkit.errors import ManifestConsistencyError, WeightsError
from exportkit.package.archive import PackageReader
from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Size, StateTensor
from exportkit.tensor_bytes import tensor_bytes


def initial_values(reader: PackageReader, state: StateTensor) -> torch.Tensor | None:
    """Returns what a tensor of the state begins with, on the CPU, with one row where its rows are alike.

    Returns:
        None if the package has no record of it: it begins with zeros.

    Raises:
        ManifestConsistencyError: The record has another size.
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

    Sessions keep beginning as the package says. So what would be ignored is refused, unless it says the same.

    Raises:
        WeightsError: One is not what sessions begin with, in any number of rows.
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
