"""Imports point one way, and the light parts stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exportkit.cli.app import COMMANDS
from tests.subprocesses import output_of

ROOT = Path(__file__).parents[2]


def test_imports_point_one_way():
    lint = Path(sys.executable).with_name("lint-imports")
    output_of(lint, "--no-cache", "--no-logo", cwd=ROOT)


def test_a_server_has_no_circle_that_only_type_checking_sees():
    names = {path.with_suffix("").relative_to(ROOT): path for path in (ROOT / "exportkit" / "serve").rglob("*.py")}
    modules = {".".join(name.parts): path for name, path in names.items()}
    left = {module: _imported(path) & modules.keys() for module, path in modules.items()}
    while ends := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in ends}
    assert left == {}  # those in a circle, and those that need one of them


def _imported(path: Path) -> set[str]:
    """Returns the modules that a module names anywhere, under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("exportkit", ["torch", "click", "rich"]),
        ("exportkit.cli", ["torch", "rich"]),
        ("exportkit.package.archive", ["torch", "exportkit.arr_coc.ops"]),
        ("exportkit.packaging", ["torch"]),
        ("exportkit.runtime", ["exportkit.arr_coc", "exportkit.export", "click", "rich"]),
        ("exportkit.export.artifact", ["setuptools"]),
    ],
)
def test_importing_a_part_does_not_import(module: str, forbidden: list[str]):
    code = f"import sys, {module}; print([m for m in {forbidden!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_module_name_stands_for_two_things():
    """The same name means the same thing: a command and what it runs, an operator and its Triton form."""
    places: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "exportkit").rglob("*.py")):
        if not path.name.startswith("__") and path.parent.parts[-2:] not in {("exportkit", "cli"), ("ops", "triton")}:
            places.setdefault(path.stem, []).append(path)
    assert [found for found in places.values() if len(found) > 1] == []


def test_no_public_class_name_stands_for_two_things():
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "exportkit").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_command_has_the_name_of_what_it_runs():
    for path in (ROOT / "exportkit" / "cli").glob("*.py"):
        elsewhere = [other for other in (ROOT / "exportkit").rglob(path.name) if other != path]
        assert path.name == "__init__.py" or not elsewhere or path.stem in COMMANDS


def test_one_place_starts_python_processes():
    starts = re.compile(r"Popen|sys\.executable|multiprocessing")
    found = [path for path in (ROOT / "exportkit").rglob("*.py") if starts.search(path.read_text())]
    # The other runs the command of whoever signs, which it ends with all its children.
    places = ("child/process.py", "package/external_key.py")
    assert sorted(found) == [ROOT / "exportkit" / name for name in places]


def test_no_test_library_is_in_the_product():
    for path in (ROOT / "exportkit").rglob("*.py"):
        assert not re.search(r"unittest|^import pytest|^from pytest", path.read_text(), re.MULTILINE), path


def test_benchmarks_import_what_there_is():
    missing = []
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("exportkit.", "tools.")):
                place = ROOT / node.module.replace(".", "/")
                source = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
                names = [each.name for each in node.names if not (place / f"{each.name}.py").exists()]
                missing += [f"{path}: {name}" for name in names if not re.search(rf"\b{name}\b", source)]
    assert missing == []
