"""Which names a new operator and a new package may have."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import keyword
import re
from collections.abc import Iterable

from exportkit.errors import UsageError
from exportkit.libraries import TORCH_NAMESPACES

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
    """Checks the name of a new operator.

    Args:
        name: The name.
        python_sources: The Python code that will have a function of this name.

    Raises:
        UsageError: The name is not allowed; the message says why.
    """
    _check_form("an operator", name)
    if name == "name":  # torch.ops.<namespace>.name is the namespace's name
        raise UsageError(
            "an operator cannot be called 'name': torch.ops has something else there", hint="Choose another name."
        )
    used = {node.id for source in python_sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    if name in used:
        raise UsageError(
            f"an operator cannot be called {name!r}: the Python code that is written uses that name for something else",
            hint=f"Choose another name, such as {name}_values.",
        )


def check_package_name(name: str) -> None:
    """Checks the name of a new package, which is also its namespace in torch and in C++.

    Raises:
        UsageError: The name is not allowed; the message says why.
    """
    _check_form("a package", name)
    if name in TORCH_NAMESPACES or name in _ATTRIBUTES_OF_TORCH_OPS:
        raise UsageError(
            f"a package cannot be called {name!r}: torch has the namespace torch.ops.{name}",
            hint="Choose another name. It becomes the namespace of the operators.",
        )
    if name in _FOLDERS:
        raise UsageError(
            f"a package cannot be called {name!r}: that means the package's {name}",
            hint=f"Choose another name, such as {name}_ops.",
        )
    if name in _CPP_KEYWORDS.split() or hasattr(ctypes.CDLL(None), name):
        raise UsageError(
            f"a package cannot be called {name!r}: it becomes a namespace in C++, where the name means something else",
            hint=f"Choose another name, such as {name}_ops.",
        )
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        raise UsageError(
            f"a package cannot be called {name!r}: Python has a module of that name already ({spec.origin})",
            hint=f"Choose another name, or remove that package: pip uninstall {name}. To add an operator to it, name "
            "its folder with --output.",
        )


def _check_form(what: str, name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} cannot be the name of {what}",
            hint="Use lower-case letters and digits, in words joined by one underscore, such as scale_rows; "
            f"no keyword of Python, and at most {_LONGEST} characters.",
        )
