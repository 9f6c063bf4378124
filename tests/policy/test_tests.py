"""The tests themselves: names that can be read, and one way to import what they share."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXTS = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")) if "third_party" not in path.parts}


def found(pattern: str) -> list[str]:
    """Where the first group of a pattern stands in the tests."""
    matches = [(path, match) for path, text in TEXTS.items() for match in re.finditer(pattern, text, re.MULTILINE)]
    return [f"{path.relative_to(ROOT)}: {match[1]}" for path, match in matches]


def test_a_tests_name_has_at_most_80_characters() -> None:
    assert found(r"^ *(?:async )?def (test_\w{76,})") == []


def test_modules_of_tests_are_imported_by_their_whole_names() -> None:
    """Not by the name alone, which works where pytest has put the folder on the search path, and nowhere else."""
    assert found(rf"^ *(?:from|import) ({'|'.join({path.stem for path in TEXTS})})\b") == []


def test_limits_that_tests_set_have_public_names() -> None:
    """Who changes a private one would not expect that anybody else relies on it."""
    assert found(r"setattr\([\w., ]*\"(?:[\w.]*\.)?(_[A-Z][A-Z_]+)\"") == []


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports a file by its name alone, and refuses the second of a name."""
    assert [name for name, count in Counter(path.name for path in TEXTS).items() if count > 1 and "test_" in name] == []


def test_a_library_is_loaded_into_a_process_of_tests_by_exportkit() -> None:
    """torch would crash the process where another test has loaded a package with the same library."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    texts = [text for text in TEXTS.values() if ".load_library(" in text]
    functions = (node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    calls = [ast.unparse(node) for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)]
    assert [call for call in calls if call.startswith(("torch.ops.load_library(", "torch.classes.load_library("))] == []
