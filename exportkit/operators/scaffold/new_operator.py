"""Writes the files of a new operator into a package that stands alone."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import NoReturn

import exportkit
from exportkit.errors import UsageError
from exportkit.libraries import TORCH_NAMESPACES
from exportkit.package.atomic import write_whole

TEMPLATES = Path(__file__).parent / "templates"

# What differs in the files that the kinds share: the header, the number that a call has beside x, and the layout.
_KINDS: Mapping[str, Mapping[str, str]] = {
    "elementwise": {"header": "elementwise", "number": " 0.5", "x": "...", "result": "..."},
    "rows": {"header": "rows", "number": " 1e-6", "x": "... D", "result": "... D"},
    "reduction": {"header": "rows", "number": "", "x": "... D", "result": "..."},
    "empty": {"header": "empty", "number": "", "x": "...", "result": "..."},
}
KINDS = tuple(_KINDS)

# From a template to the file that it becomes. Both may name `$op` and `$package`.
_PACKAGE_FILES = {
    "package/README.md": "README.md",
    "package/pyproject.toml": "pyproject.toml",
    "package/setup.py": "setup.py",
    "package/gitignore": ".gitignore",
    "package/workflow.yml": ".github/workflows/tests.yml",
    "package/common.h": "csrc/common.h",
    "package/common.cuh": "csrc/common.cuh",
    "package/conftest.py": "tests/conftest.py",
    "package/_common.py": "$package/_common.py",
    "package/__init__.py": "$package/__init__.py",
}
_OPERATOR_FILES = {
    "operator/$header.h": "csrc/$op.h",
    "operator/$kind/op.cpp": "csrc/$op.cpp",
    "operator/$kind/op.cu": "csrc/$op.cu",
    "operator/$kind/op.py": "$package/$op.py",
    "operator/test_op.py": "tests/test_$op.py",
    "operator/op_model.py": "${op}_model.py",
}
_BLOCK_SUM = {"package/block_sum.cuh": "csrc/block_sum.cuh"}  # what rows and reductions share


@dataclass(frozen=True)
class NewOperator:
    """An operator to write, of one of KINDS, into a package that has its namespace.

    Without `package` it is the one that `folder`, the working folder, is of. `output` is the package's folder; None:
    `folder` if it is that package's, else a folder in it with its name.
    """

    name: str
    package: str | None
    kind: str
    folder: Path
    output: Path | None = None


@dataclass(frozen=True)
class WrittenFiles:
    """What was written into a package's folder: all of the files are new, but for the package's __init__.py."""

    folder: Path
    files: tuple[str, ...]
    package: str


def write_operator(new: NewOperator) -> WrittenFiles:
    """Writes an operator's files. Existing files are not changed, but for a line that the package's __init__.py gets.

    UsageError: a name is not allowed, a file exists already, or there is no package to add the operator to.
    """
    check_operator_name(new.name, ())
    package = new.package or _package_in(new.output or new.folder, new.name)
    folder = new.output or (new.folder if _is_package(new.folder, package) else new.folder / package)
    names = {"op": new.name, "package": package, "kind": new.kind, **_KINDS[new.kind]}
    names["argument"] = names["number"] and f",{names['number']}"
    names["scalar"] = "" if "D" in names["x"] else ", ()"  # a row is a dimension
    shared: Mapping[str, str] = _BLOCK_SUM if names["header"] == "rows" else {}
    if _is_package(folder, package):
        # The package may have been written for kinds that share nothing.
        templates = {**_OPERATOR_FILES, **{key: path for key, path in shared.items() if not (folder / path).exists()}}
    else:
        check_package_name(package)
        templates = {**_PACKAGE_FILES, **shared, **_OPERATOR_FILES}
    files = _checked(folder, templates, names)
    initial = f"{package}/__init__.py"
    before = files.pop(initial, None) or (folder / initial).read_text()
    _write(folder, files)
    line = f"from {package}.{new.name} import {new.name} as {new.name}\n"
    write_whole(folder / initial, _with_import(before, line, f"from {package}.").encode())
    return WrittenFiles(folder, (*files, initial), package)


def _rendered(files: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    texts = {}
    for source, path in files.items():
        template = (TEMPLATES / f"{Template(source).substitute(names)}.template").read_text()
        texts[Template(path).substitute(names)] = Template(template).substitute(names)
    return texts


def _checked(folder: Path, templates: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """The files to write, by path, after the check that the names work and that no file is in the way."""
    others = _rendered(templates, {**names, "op": "_"})
    check_operator_name(names["op"], [text for path, text in others.items() if path.endswith(".py")])
    files = _rendered(templates, names)
    taken = [path for path in files if (folder / path).exists() or (folder / path).is_symlink()]
    if taken:
        said = f"{folder} has {', '.join(taken)} already, and nothing is overwritten"
        raise UsageError(said, hint="Choose another name or another folder, or remove what is there.")
    return files


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / path, text.encode())


def _with_import(source: str, line: str, start: str) -> str:
    """The source of an __init__.py with one more import, among those that start alike and in their order."""
    lines = source.splitlines(keepends=True)
    later = (at for at, other in enumerate(lines) if other.startswith(start) and other > line)
    last = max((at + 1 for at, other in enumerate(lines) if other.startswith(start)), default=len(lines))
    lines.insert(next(later, last), line)
    return "".join(lines)


def _is_package(folder: Path, package: str) -> bool:
    return (folder / package / "_common.py").is_file() and (folder / "csrc" / "common.h").is_file()


def _package_in(folder: Path, operator: str) -> str:
    """The package in a folder. Raises UsageError if there is none, or several."""
    packages = [path.parent.name for path in folder.glob("*/_common.py") if _is_package(folder, path.parent.name)]
    if len(packages) == 1:
        return packages[0]
    checkout = Path(exportkit.__file__).parents[1]
    if (checkout / "CONTRIBUTING.md").is_file() and folder.resolve().is_relative_to(checkout):
        hint = f"For an operator of exportkit's own, copy the one that {checkout / 'CONTRIBUTING.md'} names."
    else:
        hint = (
            f"Name the package that shall have the operator, such as --package my_ops; it is written if there is none: "
            f"exportkit ops new {operator} --package my_ops"
        )
    raise UsageError(f"{folder.resolve()} has no package with operators", hint=hint)


_LONGEST = 64
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# What `torch.ops` has beside the namespaces that operators are registered in.
_ATTRIBUTES_OF_TORCH_OPS = {"higher_order", "import_module", "load_library", "loaded_libraries", "prim"}
_FOLDERS = ("build", "csrc", "dist", "tests")  # beside the package's own
# A package's name is also a namespace in C++.
_CPP_KEYWORDS = (
    "alignas alignof asm auto bool bitand bitor catch char class compl concept const constexpr default delete do "
    "double enum explicit export extern float friend goto inline int long mutable namespace new noexcept nullptr "
    "operator private protected public register requires short signed sizeof static std struct switch template "
    "this throw typedef typeid typename union unsigned using virtual void volatile xor"
)


def check_operator_name(name: str, python_sources: Iterable[str]) -> None:
    """Checks the name of a new operator, which the Python code will have. UsageError says why it is not allowed."""
    _check_form("an operator", name)
    used = {node.id for source in python_sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    if name == "name":  # torch.ops.<namespace>.name is the namespace's name
        _refuse("an operator", name, "torch.ops has something else there")
    if name in used:
        _refuse("an operator", name, "the Python code that is written uses that name for something else")


def check_package_name(name: str) -> None:
    """Checks the name of a new package, also a namespace in torch and in C++. UsageError says why not."""
    _check_form("a package", name)
    if name in TORCH_NAMESPACES or name in _ATTRIBUTES_OF_TORCH_OPS:
        _refuse("a package", name, f"torch has the namespace torch.ops.{name}")
    if name in _FOLDERS:
        _refuse("a package", name, f"that means the package's {name}")
    if name in _CPP_KEYWORDS.split() or hasattr(ctypes.CDLL(None), name):
        _refuse("a package", name, "it becomes a namespace in C++, where the name means something else")
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        more = f", remove that package (pip uninstall {name}), or add to it by naming its folder with --output"
        _refuse("a package", name, f"Python has a module of that name already ({spec.origin})", more)


def _refuse(what: str, name: str, why: str, more: str = "") -> NoReturn:
    hint = f"Choose another name, such as my_{name}{more}."
    raise UsageError(f"{what} cannot be called {name!r}: {why}", hint=hint)


def _check_form(what: str, name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} cannot be the name of {what}",
            hint="Use lower-case letters and digits, in words joined by one underscore, such as scale_rows; "
            f"no keyword of Python, and at most {_LONGEST} characters.",
        )
