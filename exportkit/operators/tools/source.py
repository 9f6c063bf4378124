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
from exportkit.libraries import host_platform

Kind = Literal["file", "folder", "module", "model"]

# A folder of a kernel repository for the Hugging Face hub: build/torch213-cxx11-cpu-x86_64-linux.
_VARIANT = re.compile(
    r"torch(?P<stable>-stable-abi)?(?P<version>\d+)(?:-cxx11)?-(?P<backend>[a-z]+)(?P<cuda>\d*)-(?P<host>.+)"
)
_ANY_HOST = re.compile(r"torch-(?:universal|(?P<backend>[a-z]+))")


class OperatorSource(Message, frozen=True):
    """Where operators come from.

    Attributes:
        kind: `file`: a shared library. `folder`: a Python package, or a kernel repository with a `build` folder.
            `module`: a Python module by name, or by the path of its file. `model`: what `exportkit export` takes.
        text: The absolute path, or the name.
    """

    kind: Kind
    text: str

    @property
    def name(self) -> str:
        """A short name for reports."""
        return self.text if self.kind in ("module", "model") else Path(self.text).name


def parse_source(text: str, *, models: bool) -> OperatorSource:
    """Reads LIBRARY, or LIBRARY|MODULE.

    Args:
        text: A shared library, a folder, the name of a module, the path of its file; or a model.
        models: Whether a model is allowed.

    Raises:
        UsageError: The text names nothing of that kind.
    """
    path, forms = Path(text), "a shared library (.so), a Python package (my_package.ops), its folder, or a .py file"
    if text.endswith(".pt2"):
        raise UsageError(
            f"{text} is a package or an artifact, not an operator library",
            hint=f"`exportkit inspect {text}` lists its operators and libraries.",
        )
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

    Raises:
        UsageError: It cannot be found.
        LibraryLoadError: The dynamic linker refused the library.
        ExportError: Importing it raised an error.
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
    """Imports the Python package in a folder under the folder's name. Names of variants are no identifiers."""
    if not (folder / "__init__.py").is_file():
        folder = _variant(folder)
    name = re.sub(r"\W", "_", folder.name)
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # if it fails, the process has nothing else to do


def _variant(repository: Path) -> Path:
    """Returns the package of a kernel repository that fits this torch and this machine."""
    import torch

    version = tuple(map(int, torch.__version__.split(".")[:2]))
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    backends = ("cpu",) if torch.version.cuda is None else ("cuda", "cu", "cpu")
    host = "-".join(reversed(host_platform().split("-")))  # x86_64-linux

    def rank(name: str) -> tuple[int, int, int] | None:
        if match := _VARIANT.fullmatch(name):
            built = (int(match["version"][0]), int(match["version"][1:]))
            fits = built <= version if match["stable"] else built == version
            major, minor = int(match["cuda"][:-1] or cuda[0]), int(match["cuda"][-1:] or 0)  # cu128 is CUDA 12.8
            fits = fits and major == cuda[0] and minor <= cuda[1]
            if match["host"] == host and match["backend"] in backends and fits:
                return bool(match["stable"]), backends.index(match["backend"]), -minor
        if (match := _ANY_HOST.fullmatch(name)) and match["backend"] in (None, *backends):
            return 2, 0, 0
        return None

    folders = sorted(path for path in (repository / "build").glob("torch*") if path.is_dir())
    ranked = sorted((found, path) for path in folders if (found := rank(path.name)) is not None)
    if not ranked:
        there = ", ".join(path.name for path in folders)
        raise UsageError(
            f"{repository} has no __init__.py"
            + (f", and no build for torch {version[0]}.{version[1]} on {host}: it has {there}" if there else ""),
            hint="Give the folder of a Python package, or a kernel repository with build/<variant>/.",
        )
    chosen = ranked[0][1]
    packages = [chosen, *sorted(chosen.iterdir())]
    package = next((each for each in packages if (each / "__init__.py").is_file()), None)
    if package is None:
        raise UsageError(f"{chosen} has no Python package: there is no __init__.py in it")
    return package
