"""What MODEL may be, as far as that shows without importing it or torch."""

from __future__ import annotations

import difflib
import shlex
import zipfile
from pathlib import Path

from exportkit.errors import ModelNotFoundError
from exportkit.installed import installed_models
from exportkit.package.weights_hints import to_safetensors

_WEIGHTS = {".pt", ".pth", ".ckpt", ".bin", ".safetensors"}  # the endings of checkpoints


def check_model_name(model: str) -> None:
    """Checks that MODEL names something that can be looked up."""
    if model in installed_models():
        return
    if Path(model).suffix in _WEIGHTS and Path(model).is_file():
        raise _weights_alone(Path(model))
    if model.endswith(".pt2"):
        _check_file(Path(model))
        return
    name, colon, attribute = model.rpartition(":")
    if not colon or not attribute:
        raise ModelNotFoundError(f"{model!r} is not a model", hint=_form(model.removesuffix(":")))
    if name.endswith(".py"):
        _check_file(Path(name))


def check_not_weights(path: Path) -> None:
    """Refuses a checkpoint where a package is wanted. What an archive is, the reader of packages says."""
    if path.suffix in _WEIGHTS and path.is_file() and not zipfile.is_zipfile(path):
        raise _weights_alone(path)


def _weights_alone(path: Path) -> ModelNotFoundError:
    """Explains that a checkpoint has weights, which the model's code must take; or that a file is TorchScript's."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                hint = "Name the code that it was made of: path/file.py:Class, with --weights for its parameters."
                return ModelNotFoundError(f"{str(path)!r} is TorchScript, which torch.export does not read", hint=hint)
    weights = shlex.quote(str(path.with_suffix(".safetensors")))
    hint = f"`export` takes the code that makes the model: path/file.py:Class --weights {weights}."
    if path.suffix != ".safetensors":
        hint += f" {to_safetensors(path)}"
    return ModelNotFoundError(f"{str(path)!r} is a checkpoint: it has weights, and not the model's code", hint=hint)


def _check_file(path: Path) -> None:
    if path.is_file():
        return
    folder = path.parent
    others = [each.name for each in folder.glob(f"*{path.suffix}")] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, others, 1)
    hint = f"Did you mean {folder / close[0]}?" if close else f"The folder is {folder.resolve()}."
    raise ModelNotFoundError(f"there is no file {path}", hint=hint)


def _form(model: str) -> str:
    """Returns the advice for a text that names no attribute."""
    path = Path(model if model.endswith(".py") else f"{model}.py")
    if path.is_file():
        return f"Say what in it: {path}:attr."
    built_in = installed_models()
    close = difflib.get_close_matches(model, built_in, 1)
    names = f"a built-in name ({', '.join(built_in)}), " if built_in else ""
    mean = f"Did you mean {close[0]}? " if close else ""
    return f"{mean}Give {names}package.module:attr, path/file.py:attr, or an ExportedProgram .pt2."
