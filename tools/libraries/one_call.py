"""Calls a package in a process that has no library but the package's, and compares with what eager answered.

python -m tools.libraries.one_call save MODEL LIBRARY DEVICE FILE
python -m tools.libraries.one_call compare PACKAGE DEVICE FILE HIDDEN ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.testing import assert_close

import exportkit

_NEAR = {"rtol": 1e-2, "atol": 1e-2}  # `verify` knows how near an answer must be; this one must be the same call's


def save(name: str, library: str, device: str, file: str) -> None:
    """Saves the arguments of a model's example call, and what eager answers."""
    from exportkit.export.programs.resolve import resolve

    spec = resolve(name, op_libraries=[Path(library) if library.endswith(".so") else library]).spec
    args, kwargs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device), (tuple(spec.example_inputs), dict(spec.example_kwargs))
    )
    before = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
    with torch.no_grad():
        answer = spec.model.eval().to(device)(*args, **kwargs)
    torch.save((before, answer), file)


def compare(package: str, device: str, file: str, *hidden: str) -> None:
    """Calls the package where no module of the library can be imported."""
    sys.modules.update(dict.fromkeys(hidden))  # None: importing it fails
    (args, kwargs), expected = torch.load(file, weights_only=True)
    with exportkit.load(package, device) as model:
        assert_close(model(*args, **kwargs), expected, equal_nan=True, **_NEAR)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    foreign = [path for path in mapped if set(Path(path).parts) & set(hidden)]
    assert not foreign, f"{foreign[0]} is loaded, beside the package's"
    print("It agrees.")


if __name__ == "__main__":
    {"save": save, "compare": compare}[sys.argv[1]](*sys.argv[2:])
