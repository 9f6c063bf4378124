"""Calls a package in a process that has no library but the package's, and compares with what eager answered.

`python -m tools.libraries.one_call save MODEL LIBRARY DEVICE FILE` asks eager, and
`python -m tools.libraries.one_call compare PACKAGE DEVICE FILE HIDDEN ...` the package.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only

import exportkit


class _Hidden(MetaPathFinder):
    """Finds none of some modules, wherever they lie."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: Any) -> None:
        """Refuses these modules, and leaves the others to other finders."""
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"{name} is hidden")


def save(name: str, library: str, device: str, file: str) -> None:
    """Saves the arguments of a model's example call, and what eager answers."""
    from exportkit.export.models.resolve import resolve

    spec = resolve(name, op_libraries=[Path(library) if library.endswith(".so") else library]).spec
    example = (tuple(spec.example_inputs), dict(spec.example_kwargs))
    before, (args, kwargs) = (tree_map_only(torch.Tensor, lambda each: each.clone().to(device), example) for _ in "12")
    with torch.no_grad():
        answer = spec.model.eval().to(device)(*args, **kwargs)
    torch.save((before, answer), file)


def compare(package: str, device: str, file: str, *hidden: str) -> None:
    """Calls the package where no module of the library can be imported."""
    sys.meta_path.insert(0, _Hidden(hidden))
    (args, kwargs), expected = torch.load(file, weights_only=True)
    with exportkit.load(package, device) as model:
        answer = model(*args, **kwargs)
    # `verify` knows how near an answer must be; this must be the same call's.
    assert_close(answer, expected, rtol=1e-2, atol=1e-2, equal_nan=True)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    foreign = [path for path in mapped if set(Path(path).parts) & set(hidden)]
    assert not foreign, f"{foreign[0]} is loaded, beside the package's"
    print("It agrees.")


if __name__ == "__main__":
    _, command, *arguments = sys.argv
    save(*arguments) if command == "save" else compare(*arguments)
