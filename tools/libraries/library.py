"""What a row of the table of libraries says about a library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exportkit import ExportSpec


@dataclass(frozen=True)
class Library:
    """A library of operators that somebody else wrote, and a model that calls them.

    Attributes:
        name: What the row calls it, with the version that was tried: "torchvision 0.26.0".
        distribution: What `pip install --no-deps` takes: "torchvision==0.26.0".
        spec: Makes the model. It imports the library, and gives the fake kernels that the library lacks. None: no
            operator of it can be put into a package, and `note` says why.
        op_library: `--op-library`: a module, or the path of a shared library below one of the folders of sys.path.
        devices: Those that it has kernels for: "cpu", "cuda".
        note: One sentence, where something cannot be had.
    """

    name: str
    distribution: str
    spec: Callable[[], ExportSpec] | None
    op_library: str
    devices: tuple[str, ...] = ("cpu",)
    note: str = ""
