"""ARR-COC is a plugin: the toolchain finds it as it finds everybody's package, and knows nothing of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("arr_coc", "arr-coc")


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def named_in_code(path: Path) -> list[str]:
    """What code, other than docstrings and help, says of the plugin: modules, names and texts."""
    text = path.read_text()
    tree = ast.parse(text if any(name in text for name in NAMES) else "")
    documentation = set(map(id, docstrings(tree)))
    found = []
    for node in ast.walk(tree):
        said = {
            ast.Constant: lambda n: n.value if isinstance(n.value, str) and id(n) not in documentation else "",
            ast.Name: lambda n: n.id,
            ast.Attribute: lambda n: n.attr,
            ast.ImportFrom: lambda n: n.module or "",
            ast.alias: lambda n: n.name,
        }.get(type(node), lambda n: "")(node)
        if any(name in said for name in NAMES):
            found.append(said)
    return found


def test_no_code_of_the_toolchain_names_the_plugin() -> None:
    sources = [path for path in (ROOT / "exportkit").rglob("*.py") if "arr_coc" not in path.parts]
    assert len(sources) > 200
    assert {str(path): named for path in sources if (named := named_in_code(path))} == {}


def test_no_source_of_the_reader_or_the_runtime_names_the_plugin() -> None:
    sources = [path for folder in ("package", "runtime") for path in (ROOT / "csrc" / folder).rglob("*.[ch]*")]
    assert len(sources) > 50
    assert [path for path in sources if any(name in path.read_text() for name in NAMES)] == []
