"""Compares the table of what export replaces within torch with other versions of torch, which are read and not run.

    pip download --no-deps torch==2.15.0 && unzip -q torch-2.15.0*.whl 'torch/*.py' -d torch-2.15
    python -m tools.torch_signatures torch-2.15

Each folder holds a folder `torch`. Prints what differs, and exits with 1 then.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

from exportkit.export.torch_patches.patch_table import ANY, PATCHES, Patch
from exportkit.export.torch_patches.patched import is_needed


def signature_in(folder: Path, owner: str, name: str) -> str | None:
    """Returns the signature of an attribute in an unpacked torch: "" of a value, None if it is not there.

    Args:
        folder: The folder that holds `torch`.
        owner: The module and class, as in the table.
        name: The attribute.
    """
    module, _, of = owner.partition(":")
    path = folder.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return None
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    if of:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == of), [])
    found = None
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            found = _bare(node.args)
        elif isinstance(node, ast.ImportFrom) and node.module and any((a.asname or a.name) == name for a in node.names):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            found = signature_in(folder, f"{package}.{node.module}" if node.level else node.module, name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = "" if any(isinstance(t, ast.Name) and t.id == name for t in targets) else found
    return found


def _bare(arguments: ast.arguments) -> str:
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [each and ast.Constant(...) for each in arguments.kw_defaults]
    return f"({ast.unparse(arguments)})"


def differences(folder: Path) -> list[str]:
    """Returns a line for each entry of the table that does not fit. What is not Python's there is passed over."""
    file = folder / "torch" / "version.py"
    if (version := re.search(r"__version__ = '(.+)'", file.read_text())) is None:
        raise SystemExit(f"{file} has no __version__: unpack the wheel of a release of torch")
    needed = [patch for patch in PATCHES.values() if is_needed(patch, version[1])]
    return [line for patch in needed if (line := _difference(folder, patch))]


def _difference(folder: Path, patch: Patch) -> str | None:
    if not patch.owner.startswith("torch") or patch.signatures in ((), (ANY,)):
        return None
    found = signature_in(folder, patch.owner, patch.name)
    return None if found in patch.signatures else f"{patch.key}{found or ' is not there'}, not {patch.signatures}"


def main() -> int:
    """Compares each folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    found = [f"{folder}: {line}" for folder in parser.parse_args().folders for line in differences(folder)]
    print("\n".join(found) or "all of the table fits")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
