"""Exports, packages and verifies models that call operators of other projects, for those that are installed.

python -m tools.try_libraries [LIBRARY ...]
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from exportkit import ExportSpec


class _MulAdd(torch.nn.Module):
    """The operators of PyTorch's tutorial on C++ extensions: two that return a tensor, one that writes into one."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.ops = getattr(torch.ops, namespace)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        product = self.ops.mymul(self.ops.mymuladd(a, b, 0.5), b)
        total = torch.empty_like(product)
        self.ops.myadd_out(product, a, total)
        return total


class _Jagged(torch.nn.Module):
    """Operators of fbgemm from two libraries: sums of lengths, and rows of several lengths in one padded tensor."""

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [4], 0.0)


def _draw_jagged(sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    lengths = torch.randint(0, 4, (sizes["batch"],), generator=generator)
    return (torch.randn(3 * sizes["batch"], 8, generator=generator), lengths), {}


def extension_cpp() -> ExportSpec:
    """The plain form of pytorch/extension-cpp."""
    return _mul_add(importlib.import_module("extension_cpp"))


def extension_cpp_stable() -> ExportSpec:
    """The form of pytorch/extension-cpp for the stable ABI."""
    return _mul_add(importlib.import_module("extension_cpp_stable"))


def fbgemm_gpu() -> ExportSpec:
    """fbgemm-gpu or fbgemm-gpu-cpu."""
    importlib.import_module("fbgemm_gpu")
    return ExportSpec(
        model=_Jagged(),
        example_inputs=(torch.randn(9, 8), torch.tensor([2, 0, 3])),
        dynamic_shapes={"values": {0: "3*batch[1:64]"}, "lengths": {0: "batch"}},
        draw_inputs=_draw_jagged,
    )


LIBRARIES: Mapping[str, Callable[[], ExportSpec]] = {
    made.__name__: made for made in (extension_cpp, extension_cpp_stable, fbgemm_gpu)
}


def _mul_add(module: ModuleType) -> ExportSpec:
    return ExportSpec(
        model=_MulAdd(module.__name__),
        example_inputs=(torch.randn(3, 5), torch.randn(3, 5)),
        dynamic_shapes={"a": {0: "rows[1:64]"}, "b": {0: "rows"}},
    )


def run(library: str, device: str) -> str:
    """Exports a model for the device and packages it, which verifies it. Returns what was seen, in one line."""
    model = f"{Path(__file__)}:{library}"
    with tempfile.TemporaryDirectory() as folder:
        compiled, package = Path(folder, "compiled.pt2"), Path(folder, "package.pt2")
        exported = _exportkit("export", model, "--device", device, "-o", compiled, "--op-library", library)
        if exported.returncode:
            return f"export: exit {exported.returncode}: {exported.stderr.strip().splitlines()[-2:]}"
        packaged = _exportkit("package", compiled, "-o", package, "--op-library", library, "--json")
        if packaged.returncode:
            return f"package: exit {packaged.returncode}: {packaged.stderr.strip().splitlines()[-2:]}"
        manifest = json.loads(packaged.stdout)["manifest"]
        names = [Path(each["record"]).name for each in manifest["libraries"]]
        return f"ok, {len(manifest['operators'])} operators, with {', '.join(names)}"


def _exportkit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "exportkit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main(names: Sequence[str]) -> None:
    """Prints a line for each library and device of this machine."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for library in names or LIBRARIES:
        if importlib.util.find_spec(library) is None:
            print(f"{library}: not installed")
            continue
        for device in devices:
            print(f"{library}, {device}, torch {torch.__version__}: {run(library, device)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
