"""Imports what MODEL and other options name: `package.module:attr`, `path/file.py:attr`, or a registered name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from exportkit.errors import ModelNotFoundError
from exportkit.export.models.model_names import check_model_name
from exportkit.installed import installed_models
from exportkit.spec import ExportSpec


def named_attribute(model: str) -> Any:
    """Returns the attribute that `package.module:attr` or `path/file.py:attr` names."""
    built_in = installed_models()
    module_name, colon, attribute = built_in.get(model, model).rpartition(":")
    if not colon or not attribute:
        check_model_name(model)
    module = import_code(module_name)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            candidates = sorted(name for name, item in vars(module).items() if _is_candidate(name, item, module))
            close = difflib.get_close_matches(attribute, candidates, 1)
            mean = f"Did you mean {close[0]}? " if close else ""
            raise ModelNotFoundError(
                f"{module_name} has no {attribute!r}",
                hint=f"{mean}It has {', '.join(candidates) or 'nothing to export'}.",
            )
        value = getattr(value, part)
    return value


def _is_candidate(name: str, item: Any, module: ModuleType) -> bool:
    if name.startswith("_"):
        return False
    if isinstance(item, (ExportSpec, torch.nn.Module)):
        return True
    return callable(item) and getattr(item, "__module__", None) == module.__name__


def import_code(name: str) -> ModuleType:
    """Imports `package.module` or `path/file.py`. The working directory and the file's folder are searched last."""
    return _import_file(Path(name)) if name.endswith(".py") else _import_module(name)


def _import_module(name: str) -> ModuleType:
    # `python -m` has the working directory on its path, a console script has not. It goes last and shadows nothing.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ModelNotFoundError(
                f"there is no module {error.name!r} in the installed packages or in {Path.cwd()}",
                hint="For a file, write its path, such as path/file.py.",
            ) from error
        raise ModelNotFoundError(f"{name} imports {error.name!r}, which is not installed") from error
    except ImportError as error:
        raise ModelNotFoundError(f"{name} cannot be imported: {error}") from error


def _import_file(path: Path) -> ModuleType:
    check_model_name(f"{path}:attribute")
    path = path.resolve()
    # Like `python file.py`, makes the file's folder importable. It goes last and shadows nothing.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = path.stem if path.stem.isidentifier() else "exported_model"
    loaded = sys.modules.get(name)
    if loaded is not None:
        if (file := getattr(loaded, "__file__", None)) is not None and Path(file).resolve() == path:
            return loaded
        name = f"_exportkit_{name}"  # a file must not replace an imported module of the same name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ImportError):
            raise ModelNotFoundError(f"{path} cannot be imported: {error}") from error
        raise
    return module
