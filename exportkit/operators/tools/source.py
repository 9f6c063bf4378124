"""What LIBRARY and MODULE name on the command line, and how a child process loads it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Literal

from exportkit.child.messages import Message
from exportkit.errors import UsageError
from exportkit.installed import declared_modules, installed_models

Kind = Literal["file", "folder", "module", "model"]


class OperatorSource(Message, frozen=True):
    """Where operators come from: the path of a shared library or of a Python package's folder, a module, or a model.

    A module has its name, or the path of its file. A model is what `exportkit export` takes.
    """

    kind: Kind
    text: str

    @property
    def name(self) -> str:
        """A short name for reports."""
        return self.text if self.kind in ("module", "model") else Path(self.text).name


def parse_source(text: str, *, models: bool) -> OperatorSource:
    """Reads LIBRARY, or LIBRARY|MODULE where models are allowed. Raises UsageError if the text is neither."""
    path, forms = Path(text), "a shared library (.so), a Python package (my_package.ops), its folder, or a .py file"
    if text.endswith(".pt2"):
        said = f"{text} is a package or an artifact, not an operator library"
        raise UsageError(said, hint=f"`exportkit inspect {text}` lists its operators and libraries.")
    if ":" in text or text in installed_models():
        if models:
            return OperatorSource("model", text)
        raise UsageError(f"{text} is a model, not an operator library", hint=f"Give {forms}.")
    if path.is_dir():
        return OperatorSource("folder", str(path.resolve()))
    if text.endswith(".py"):
        return OperatorSource("module", text)
    if path.is_file():
        return OperatorSource("file", str(path.resolve()))
    if all(part.isidentifier() for part in text.split(".")) and not text.endswith(".so"):
        return OperatorSource("module", text)
    also = ", or a model (path/file.py:attr, package.module:attr)" if models else ""
    raise UsageError(
        f"there is no file {text!r}, and no Python module can have such a name", hint=f"Give {forms}{also}."
    )


def load(source: OperatorSource) -> None:
    """Loads the operators into this process: a child, because a bad library ends the process that loads it.

    UsageError: it cannot be found. LibraryLoadError: the dynamic linker refused it. ExportError: importing it failed.
    """
    import torch

    from exportkit.errors import LibraryLoadError
    from exportkit.export.models.importing import import_code
    from exportkit.export.models.source_lines import users_code

    if source.kind == "file":
        try:
            torch.ops.load_library(source.text)
        except OSError as error:
            said = str(error.__cause__ or error)
            raise LibraryLoadError(
                f"the dynamic linker refused {source.name}: {said}",
                hint="An undefined torch symbol means a library built for another torch; rebuild it for this one."
                if "undefined symbol" in said
                else "If it is the extension module of a Python package, give the package.",
            ) from error
        return
    with users_code(f"importing {source.text}"):
        if source.kind == "folder":
            _import_folder(Path(source.text))
            return
        module = import_code(source.text)
        if source.text in declared_modules() and hasattr(module, "register"):
            module.register()


def _import_folder(folder: Path) -> None:
    """Imports the Python package in a folder under the folder's name, which may be no identifier."""
    if not (folder / "__init__.py").is_file():
        hint = "Give the folder of a Python package: of a kernel repository build/<variant>, with this torch's name."
        if inside := sorted(each.parent for each in folder.glob("*/__init__.py")):
            hint = f"Give the folder of its package: {' or '.join(map(str, inside))}."
        raise UsageError(f"{folder} has no __init__.py", hint=hint)
    name = re.sub(r"\W", "_", folder.name)
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # if it fails, the process has nothing else to do
