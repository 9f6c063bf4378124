"""Loads and saves weights as safetensors files, atomically."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from exportkit.errors import WeightsError
from exportkit.package.atomic import write_whole

_SHOWN = 5  # names of each kind in an error message


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Fills a module's parameters and buffers from a safetensors file.

    Floating tensors are converted to the module's dtype. If a tensor does not fit, nothing changes.

    Args:
        module: The module to fill.
        path: The file, with the names of `module.state_dict()`.

    Raises:
        WeightsError: The file does not exist or is not a safetensors file, or a tensor is missing, unexpected, or has
            another shape or kind of dtype.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"there is no weights file {path}")
    state = module.state_dict()
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())  # the handle is not iterable itself
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            _check_names(path, module, state, shapes)
            tensors = {name: file.get_tensor(name) for name in state}
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a readable safetensors file: {error}") from error
    _check_dtypes(path, state, tensors)
    with torch.no_grad():
        for name, target in state.items():
            target.copy_(tensors[name])


def save_weights(module: nn.Module, path: str | Path) -> None:
    """Writes a module's parameters and buffers to a safetensors file, atomically."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    write_whole(Path(path), save(state))


def _check_names(path: Path, module: nn.Module, state: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    reshaped = [
        f"{name} is {list(shapes[name])}, must be {list(tensor.shape)}"
        for name, tensor in state.items()
        if name in shapes and shapes[name] != tuple(tensor.shape)
    ]
    problems = [
        _listed("missing", (name for name in state if name not in shapes)),
        _listed("unexpected", (name for name in shapes if name not in state)),
        _listed("with another shape", reshaped),
    ]
    if any(problems):
        raise WeightsError(
            f"{path} does not fit {type(module).__name__}: {'; '.join(filter(None, problems))}",
            hint="Build the model with the sizes of the weights, and remove tensors that it does not have from the "
            "file, such as a classification head.",
        )


def _check_dtypes(path: Path, state: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    changed = [
        f"{name} is {tensors[name].dtype}, must be {tensor.dtype}"
        for name, tensor in state.items()
        if tensor.dtype != tensors[name].dtype
        and not (tensor.is_floating_point() and tensors[name].is_floating_point())
    ]
    if changed:
        raise WeightsError(f"{path}: {_listed('with another kind of dtype', changed)}")


def _listed(what: str, names: Iterable[str]) -> str:
    found = sorted(names)
    if not found:
        return ""
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{len(found)} {what}: {', '.join(found[:_SHOWN])}{more}"
