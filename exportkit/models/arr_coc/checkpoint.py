"""Weights to and from safetensors files, all or nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from exportkit.errors import WeightsError

_SHOWN = 5  # names of each kind in an error message


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Fills a module's parameters and buffers from a safetensors file.

    Floating tensors are converted to the dtype the module has. Either every tensor fits or nothing is changed.

    Args:
        module: What to fill.
        path: The file; its names are those of `module.state_dict()`.

    Raises:
        WeightsError: No such file, no safetensors file, or a tensor that is missing, unexpected, or of another shape or
            kind of dtype.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"no weights file {path}")
    state = module.state_dict()
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())  # the handle is not iterable itself
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            _check_names(path, module, state, shapes)
            tensors = {name: file.get_tensor(name) for name in state}
    except SafetensorError as error:
        raise WeightsError(f"{path} is no readable safetensors file: {error}") from error
    _check_dtypes(path, state, tensors)
    with torch.no_grad():
        for name, target in state.items():
            target.copy_(tensors[name])


def save_weights(module: nn.Module, path: str | Path) -> None:
    """Writes a module's parameters and buffers to a safetensors file, which appears complete or not at all."""
    path = Path(path)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    # A file of its own in a private folder, rather than mkstemp: that makes files that nobody else may read.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        temporary = Path(folder, path.name)
        temporary.write_bytes(save(state))
        os.replace(temporary, path)


def _check_names(path: Path, module: nn.Module, state: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    reshaped = [
        f"{name} is {list(shapes[name])}, must be {list(tensor.shape)}"
        for name, tensor in state.items()
        if name in shapes and shapes[name] != tuple(tensor.shape)
    ]
    problems = [
        _listed("missing", (name for name in state if name not in shapes)),
        _listed("unexpected", (name for name in shapes if name not in state)),
        _listed("of another shape", reshaped),
    ]
    if any(problems):
        raise WeightsError(
            f"{path} does not fit {type(module).__name__}: {'; '.join(filter(None, problems))}",
            hint="Build the model with the sizes the weights were made for, and leave out of the file what it does not "
            "have, such as a classification head.",
        )


def _check_dtypes(path: Path, state: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    changed = [
        f"{name} is {tensors[name].dtype}, must be {tensor.dtype}"
        for name, tensor in state.items()
        if tensor.dtype != tensors[name].dtype
        and not (tensor.is_floating_point() and tensors[name].is_floating_point())
    ]
    if changed:
        raise WeightsError(f"{path}: {_listed('of another kind of dtype', changed)}")


def _listed(what: str, names: Iterable[str]) -> str:
    found = sorted(names)
    if not found:
        return ""
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{len(found)} {what}: {', '.join(found[:_SHOWN])}{more}"
