"""Exports, packages and verifies models that call operators of other projects, for those that are installed.

    python -m tools.try_libraries [--sources FOLDER] [LIBRARY ...]

Each model becomes one package with a target for each device of this machine. With `--sources`, libraries are built
first, from the folder that holds their projects, such as a clone of pytorch/extension-cpp: with CUDA where torch finds
a GPU and nvcc is there. Nothing is fetched or installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
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


class _Kept(torch.nn.Module):
    """Boxes that torchvision's non-maximum suppression keeps: one of equal ones, and none of none."""

    def forward(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        keep = torch.ops.torchvision.nms(boxes, scores, 0.5)
        return boxes[keep], scores[keep]


class _Segments(torch.nn.Module):
    """Sums over rows that torch_scatter finds by where they begin."""

    def forward(self, x: Tensor, begins: Tensor) -> Tensor:
        return torch.ops.torch_scatter.segment_sum_csr(x, begins, None)


class _Neighbours(torch.nn.Module):
    """The differences between points and their neighbours, which torch_cluster finds."""

    def forward(self, points: Tensor) -> Tensor:
        ones, others = torch.ops.torch_cluster.knn(points, points, None, None, 3, False, 1)
        return points[ones] - points[others]


def torchvision() -> ExportSpec:
    """Torchvision."""
    importlib.import_module("torchvision")
    return ExportSpec(
        model=_Kept(),
        example_inputs=(torch.rand(8, 2).repeat(1, 2) * 10 + torch.tensor([0.0, 0.0, 5.0, 5.0]), torch.rand(8)),
        dynamic_shapes={"boxes": {0: "n[0:100]"}, "scores": {0: "n"}},
    )


def torch_harmonics() -> ExportSpec:
    """torch-harmonics: an operator in Python that calls one in C++."""
    harmonics = importlib.import_module("torch_harmonics")
    model = harmonics.DiscreteContinuousConvS2(4, 6, (16, 32), (16, 32), 3)
    return ExportSpec(
        model=model, example_inputs=(torch.randn(2, 4, 16, 32),), dynamic_shapes={"x": {0: "batch[1:16]"}}
    )


def torch_scatter() -> ExportSpec:
    """torch_scatter, whose one kernel for all devices reads memory, and which has no fake kernels."""
    importlib.import_module("torch_scatter")

    @_fake(torch.ops.torch_scatter.segment_sum_csr.default)
    def _(x: Tensor, begins: Tensor, out: Tensor | None) -> Tensor:
        return x.new_empty(begins.shape[0] - 1, *x.shape[1:])

    return ExportSpec(
        model=_Segments(),
        example_inputs=_draw_segments({"n": 9, "p": 4}, torch.Generator())[0],
        dynamic_shapes={"x": {0: "n[2:100]"}, "begins": {0: "p+1[1:50]"}},
        draw_inputs=_draw_segments,
    )


def torch_cluster() -> ExportSpec:
    """torch_cluster, like torch_scatter; how many neighbours there are depends on data."""
    importlib.import_module("torch_cluster")

    @_fake(torch.ops.torch_cluster.knn.default)
    def _(x: Tensor, *_: Any) -> Tensor:
        return x.new_empty(2, torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)

    return ExportSpec(
        model=_Neighbours(), example_inputs=(torch.randn(20, 3),), dynamic_shapes={"points": {0: "n[5:100]"}}
    )


def _fake(operator: torch._ops.OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    registered: Callable[[Callable[..., Any]], Callable[..., Any]] = operator.py_impl(torch._C.DispatchKey.Meta)
    return registered


def _draw_segments(sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    n, inner = sizes["n"], torch.randint(0, sizes["n"] + 1, (sizes["p"] - 1,), generator=generator).sort().values
    return (torch.randn(n, 8, generator=generator), torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), n)])), {}


LIBRARIES: Mapping[str, Callable[[], ExportSpec]] = {
    made.__name__: made
    for made in (
        extension_cpp,
        extension_cpp_stable,
        fbgemm_gpu,
        torchvision,
        torch_harmonics,
        torch_scatter,
        torch_cluster,
    )
}


def _mul_add(module: ModuleType) -> ExportSpec:
    return ExportSpec(
        model=_MulAdd(module.__name__),
        example_inputs=(torch.randn(3, 5), torch.randn(3, 5)),
        dynamic_shapes={"a": {0: "rows[1:64]"}, "b": {0: "rows"}},
    )


def build(library: str, sources: Path, folder: Path) -> Path | None:
    """Builds a library from its sources, in a copy of them.

    Args:
        library: The name of its Python package.
        sources: A folder with the library's project somewhere in it: a setup.py beside the package.
        folder: The folder for the copy.

    Returns:
        The folder to import the package from; None if the sources do not have it.

    Raises:
        RuntimeError: The build failed.
    """
    projects = (setup.parent for setup in sorted(sources.rglob("setup.py")))
    project = next((each for each in projects if (each / library / "__init__.py").is_file()), None)
    if project is None:
        return None
    # All of it, because a setup.py may read files of the folder above, such as README.md.
    copied = shutil.copytree(sources, folder / library, ignore=shutil.ignore_patterns(".git", "build"))
    where = copied / project.relative_to(sources)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, env=_with_headers(), check=False)
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).strip().splitlines()[-20:]))
    return where


def _with_headers() -> dict[str, str]:
    """Returns the environment, with the headers of CUDA's libraries where only the packages of torch have them."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    headers = {str(header.parent) for place in places for header in place.rglob("include/cusparse.h")}
    return {**os.environ, "CPATH": os.pathsep.join(filter(None, [os.environ.get("CPATH"), *sorted(headers)]))}


def run(library: str, devices: Sequence[str]) -> str:
    """Exports a model for each device, and makes one package of all, which verifies them. Returns what was seen."""
    model = f"{Path(__file__)}:{library}"
    with tempfile.TemporaryDirectory() as folder:
        compiled, package = [Path(folder, f"{device}.pt2") for device in devices], Path(folder, "package.pt2")
        for device, output in zip(devices, compiled):
            exported = _exportkit("export", model, "--device", device, "-o", output, "--op-library", library)
            if exported.returncode:
                return f"export for {device}: exit {exported.returncode}: {_last_lines(exported.stderr)}"
        packaged = _exportkit("package", *compiled, "-o", package, "--op-library", library, "--json")
        if packaged.returncode:
            return f"package: exit {packaged.returncode}: {_last_lines(packaged.stderr or packaged.stdout)}"
        document = json.loads(packaged.stdout)
        manifest, checks = document["manifest"], document["verification"]["checks"]
        names = [f"{Path(each['record']).name} ({each['device']})" for each in manifest["libraries"]]
        agreed = [
            f"{sum(check['target'] == each['name'] for check in checks)} calls of {each['name']} agree"
            for each in manifest["targets"]
        ]
        return f"ok, {len(manifest['operators'])} operators, with {', '.join(names)}; {', '.join(agreed)}"


def _exportkit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "exportkit", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def _last_lines(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-2:])


def main(names: Sequence[str], sources: Path | None) -> bool:
    """Prints a line for each library. Returns whether all that are there went through."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for library in names or LIBRARIES:
            if sources is not None:
                try:
                    built = build(library, sources, Path(folder))
                except RuntimeError as error:
                    good = False
                    print(f"{library}: not built: {error}", flush=True)
                    continue
                if built is not None:
                    sys.path.insert(0, str(built))
            if importlib.util.find_spec(library) is None:
                print(f"{library}: not installed")
                continue
            seen = run(library, devices)
            good = good and seen.startswith("ok")
            print(f"{library}, {' and '.join(devices)}, torch {torch.__version__}: {seen}", flush=True)
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="LIBRARY", help="libraries to try; default: all")
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="the sources of libraries to build")
    options = parser.parse_args()
    sys.exit(0 if main(options.names, options.sources) else 1)
