"""Every operator beside its ATen reference (eager, and torch.compile with --compile) and the device's copy limit.

    python benchmarks/operators.py [--device cuda] [--compile] [--output results.json]

Medians of one run on one machine. On CUDA: events, warm-up, inputs rotated so that the cache does not hold them.
"limit" is the time the bytes that must move would take at the rate of a large copy measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from exportkit.ops import SPECS

K = 200


def cases(device: torch.device, large: bool) -> list[tuple[str, str, Callable[[], tuple], int]]:
    """(operator, size, inputs, bytes that must move), at the sizes a vision pipeline has."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device)

    weights = torch.tensor([0.3, 0.4, 0.3], device=device)
    rows = []
    for batch, side in [(1, 448), (8, 1024), (32, 1024)] if large else [(1, 448), (2, 1024)]:
        pixels = batch * side * side
        rows.append(
            ("fused_texture", f"{batch}x3x{side}x{side}", lambda b=batch, s=side: (rand(b, 3, s, s),), pixels * 32)
        )
    for batch, patches, width in (
        [(1, 1024, 768), (8, 4096, 1024), (64, 4096, 1024)] if large else [(1, 1024, 384), (8, 1024, 384)]
    ):
        size, features = f"B{batch} N{patches} D{width}", batch * patches * width * 4
        side = int(patches**0.5)

        def f(b=batch, n=patches, d=width) -> torch.Tensor:
            return torch.randn(b, n, d, device=device)

        def s(b=batch, n=patches) -> torch.Tensor:
            return rand(b, n)

        rows.append(("compute_entropy", size, lambda f=f: (f(),), features))
        rows.append(
            ("query_alignment", size, lambda f=f, b=batch, d=width: (f(), torch.randn(b, d, device=device)), features)
        )
        rows.append(
            (
                "compute_salience",
                size + " P16",
                lambda f=f, b=batch, h=side * 16: (f(), rand(b, 3, h, h), rand(b, 1, h, h), rand(b, 1, h, h), 16),
                features + batch * side * side * 256 * 20,
            )
        )
        rows.append(("opponent_balance", size, lambda s=s: (s(), s(), s(), weights), batch * patches * 16))
        rows.append(
            ("top_k_patches", f"{size} k{K}", lambda f=f, s=s: (s(), f(), K), batch * (patches * 4 + K * width * 8))
        )
        rows.append(("allocate_lod_tokens", f"B{batch} K{K}", lambda b=batch: (rand(b, K),), batch * K * 12))
    return rows


def median_ms(function: Callable, inputs: list[tuple], repeats: int) -> float:
    """Median time of function(*inputs[i]), i rotating."""
    cuda = any(isinstance(t, torch.Tensor) and t.is_cuda for t in inputs[0])
    for i in range(5):
        function(*inputs[i % len(inputs)])
    times = []
    for i in range(repeats):
        args = inputs[i % len(inputs)]
        if cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function(*args)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            function(*args)
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def graph_ms(function: Callable, args: tuple, repeats: int) -> float:
    """Median time of one call replayed from a CUDA graph of 20: the kernels, without Python's launches."""
    function(*args)
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), 20
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function(*args)
    return median_ms(lambda _: graph.replay(), [(args[0],)], repeats) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", action="store_true", help="time torch.compile of the reference too")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output")
    options = parser.parse_args()
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    copied = torch.empty(1 << (30 if cuda else 26), device=device)
    bandwidth = 2 * copied.numel() * 4 / median_ms(lambda x: x.clone(), [(copied,)], 10) / 1e6
    del copied
    machine = (
        torch.cuda.get_device_name()
        if cuda
        else f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    )
    print(f"torch {torch.__version__}, {machine}, {torch.get_num_threads()} threads, copy {bandwidth:.0f} GB/s\n")
    columns = ["operator", "size", "kernel ms", *(["in a graph"] if cuda else []), "eager ms"]
    columns += [*(["compile ms"] if options.compile else []), "limit ms", "eager/kernel"]
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    results = []
    with torch.no_grad():
        for name, size, make, moved in cases(device, cuda):
            spec = SPECS[name]
            count = 3 if moved > 1 << 20 else 1
            inputs = [make() for _ in range(count)]
            row: dict[str, object] = {"operator": name, "size": size}
            row["kernel ms"] = kernel = median_ms(spec.wrapper, inputs, options.repeats)
            if cuda:
                row["in a graph"] = graph_ms(spec.wrapper, inputs[0], options.repeats)
            row["eager ms"] = eager = median_ms(spec.reference, inputs, options.repeats)
            if options.compile:
                torch._dynamo.reset()
                row["compile ms"] = median_ms(torch.compile(spec.reference, fullgraph=True), inputs, options.repeats)
            row["limit ms"] = moved / bandwidth / 1e6
            row["eager/kernel"] = eager / kernel
            results.append(row)
            print("| " + " | ".join(v if isinstance(v, str) else f"{v:.4f}" for v in row.values()) + " |", flush=True)
    if options.output:
        with open(options.output, "w") as file:
            json.dump(
                {"machine": machine, "torch": torch.__version__, "copy_gbs": bandwidth, "rows": results}, file, indent=1
            )


if __name__ == "__main__":
    main()
