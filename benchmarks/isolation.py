"""What a call costs in a worker process (`isolate=True`), beside the same call in this one.

    python benchmarks/isolation.py [artifacts/arr_coc.pt2] [--megabytes 3]

Without a package one is made whose model only adds a number to its input: nothing hides what isolation costs. Inputs
are of about the given size, as far as the package's ranges allow. Calls of both are made in turn, so that what else the
machine does falls on both; medians, and the middle half. Prints a Markdown table. On a busy machine the numbers say
little: look at `uptime` first.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

import exportkit
from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import TraceOptions
from exportkit.package.manifest import Call, Size
from exportkit.package.structure import unflatten
from exportkit.sizes import input_bytes


class AddOne(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def add_one(folder: Path, device: str) -> Path:
    example = (torch.randn(2, 3, 256, 256),)
    spec = exportkit.ExportSpec(AddOne(), example, dynamic_shapes={"x": {0: "batch[1:1024]"}})
    path = folder / "add_one.pt2"
    export_aoti(spec, path, TraceOptions(device=device, cases=1, name="add_one"))
    return path


def sizes_of(call: Call, wanted: int) -> dict[str, int]:
    """The largest sizes whose inputs are no more than this many bytes: each dimension in turn, a quarter at a time."""
    sizes = {dimension.name: dimension.min for dimension in call.dimensions}
    grew = True
    while grew:
        grew = False
        for dimension in call.dimensions:
            larger = {**sizes, dimension.name: min(dimension.max, sizes[dimension.name] * 5 // 4 + 1)}
            if larger != sizes and input_bytes(call, larger) <= wanted:
                sizes, grew = larger, True
    return sizes


def draw(call: Call, sizes: dict[str, int], device: torch.device) -> tuple[list[object], dict[str, object], int]:
    """Arguments of one call, and how many bytes their tensors have."""
    tensors = []
    for described in call.inputs:
        shape = [
            size.scale * sizes[size.dimension] + size.offset if isinstance(size, Size) else size
            for size in described.shape
        ]
        dtype = getattr(torch, described.dtype)
        tensors.append(
            torch.rand(shape).to(device, dtype) if dtype.is_floating_point else torch.ones(shape).to(device, dtype)
        )
    args = [unflatten(parameter.value, tensors) for parameter in call.parameters if parameter.kind == "positional"]
    kwargs = {p.name: unflatten(p.value, tensors) for p in call.parameters if p.kind == "keyword"}
    return args, kwargs, sum(tensor.nbytes for tensor in tensors)


def timed(model: exportkit.Model, args: list[object], kwargs: dict[str, object]) -> float:
    start = time.perf_counter()
    model(*args, **kwargs)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def milliseconds(times: list[float]) -> str:
    low, middle, high = (1e3 * quartile for quartile in statistics.quantiles(times, n=4))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, nargs="?")
    parser.add_argument("--megabytes", type=float, default=3.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        package = options.package or add_one(Path(folder), options.device)
        with (
            exportkit.load(package, device=options.device) as here,
            exportkit.load(package, device=options.device, isolate=True) as there,
        ):
            call = here.manifest.call
            args, kwargs, size = draw(call, sizes_of(call, round(options.megabytes * 1e6)), here.device)
            times: dict[str, list[float]] = {"here": [], "there": []}
            for number in range(options.calls + 20):
                for name, model in (("here", here), ("there", there)):
                    seconds = timed(model, args, kwargs)
                    if number >= 20:
                        times[name].append(seconds)
    ratio = statistics.median(times["there"]) / statistics.median(times["here"])
    added = statistics.median(times["there"]) - statistics.median(times["here"])
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads,"
    )
    print(f"load average {os.getloadavg()[0]:.1f}; {options.calls} calls of each\n")
    print("| model | inputs | in this process, ms | isolated, ms | ratio | added, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(
        f"| {here.manifest.name}, {here.target.name} | {size / 1e6:.2f} MB | {milliseconds(times['here'])} | "
        f"{milliseconds(times['there'])} | {ratio:.2f} | {1e3 * added:.3f} |"
    )


if __name__ == "__main__":
    main()
