"""One token of examples/llama, batch 1, by all that can run it: milliseconds, and GPU memory beside the weights.

    python -m benchmarks.state --folder build/state              # on a GPU: 1.5 thousand million parameters, bfloat16
    python -m benchmarks.state --folder build/small --small      # anywhere: a few thousand, float32, to try it

With --vllm FOLDER, the same model of vLLM's kernels, too (examples/vllm): the libraries lie in the folder.

Writes benchmarks/state_results/<GPU>.json and prints a Markdown table. Each row runs in a process of its own, after one
another on the same machine. On a GPU, CUDA events time calls that follow one another. nvidia-smi gives the memory after
the calls; what a process with a CUDA context alone has is taken off. The cache has its whole length from the start, so
that every token costs the same.

Packages are made in --folder, unless they are there. --make NAME makes one and measures nothing; --measure makes none.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

import exportkit

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples" / "llama"), str(ROOT / "examples" / "vllm")]
import llama  # noqa: E402 (its folder is put on the path first)

RESULTS = ROOT / "benchmarks" / "state_results"
ROUNDS, CALLS, WARM = 15, 20, 20  # fewer tokens than the cache holds
TOKENS = 32  # that rows of the same weights are compared by

Step = Callable[[torch.Tensor], torch.Tensor]


class Row(NamedTuple):
    """What runs a token: the package that it needs, how it is loaded, and whether it needs a GPU, or vLLM's kernels."""

    make: Callable[[Any], contextlib.AbstractContextManager[Step]]
    package: str | None = None
    load: Mapping[str, Any] = {}
    gpu: bool = False
    vllm: bool = False


def config(small: bool) -> llama.Config:
    return llama.Config(length=512) if small else llama.LARGE


def model(small: bool) -> llama.Llama:
    if small:
        return llama.make(config(small))
    return llama.make(config(small), device="cuda", dtype=torch.bfloat16)


def stateful(small: bool = False) -> exportkit.ExportSpec:
    """Methods prefill and decode, with the cache as state."""
    made = model(small)
    tokens = torch.randint(0, made.config.vocabulary, (1, 64), device=made.position.device)
    return exportkit.ExportSpec(
        model=made,
        name="llama",
        methods={
            "prefill": exportkit.Method(
                example_inputs=(tokens,), dynamic_shapes={"tokens": {1: f"count[2:{made.config.length // 2}]"}}
            ),
            "decode": exportkit.Method(example_inputs=(tokens[:, :1],)),
        },
        state=("cache.*", "position"),
    )


def passing(small: bool = False) -> exportkit.ExportSpec:
    """A step whose cache goes in and comes out."""
    made = model(small)
    cache = [(each.k, each.v) for each in made.cache]
    token = torch.zeros(1, 1, dtype=torch.int64, device=made.position.device)
    inputs = (token, token[0], cache)

    def draw(sizes: Mapping[str, int], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs, {}

    return exportkit.ExportSpec(
        model=llama.Passing(made), name="llama_passing", example_inputs=inputs, draw_inputs=draw
    )


def vllm(small: bool = False) -> exportkit.ExportSpec:
    """The large model of vLLM's kernels."""
    return _decoder().large()


def vllm_model() -> Any:
    return _decoder().make(_decoder().LARGE, device="cuda")


def _decoder() -> Any:
    """examples/vllm, whose operators are loaded now."""
    return importlib.import_module("decoder")


PACKAGES = ("stateful", "passing", "vllm")
"""The functions above of whose specs packages are made."""


def libraries(folder: Path) -> list[Path]:
    """vLLM's libraries."""
    return sorted(folder.rglob("*.so"))


def make_package(name: str, folder: Path, small: bool, operators: Sequence[Path]) -> dict[str, float]:
    """Makes a package by the command line, and returns the seconds of its commands."""
    source = f"{ROOT / 'benchmarks' / 'state.py'}:{name}"
    exported, packaged = folder / f"{name}_aoti.pt2", folder / f"{name}.pt2"
    device = "cpu" if small else "cuda"
    export = ["export", source, "--model-kwargs", json.dumps({"small": small}), "--device", device, "--cases", "1"]
    taken = [word for library in operators if name == "vllm" for word in ("--op-library", str(library))]
    seconds = {"export": _seconds([*export, "-o", str(exported), *taken])}
    seconds["package"] = _seconds(["package", str(exported), "-o", str(packaged), *taken])
    exported.unlink()
    (folder / f"{name}.json").write_text(json.dumps(seconds))
    return seconds


def _seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "exportkit", *arguments], check=True, cwd=ROOT, stdout=sys.stderr)
    return round(time.perf_counter() - start, 1)


# --- rows: each yields a function from a token [1, 1] to logits -------------------------------------------------------


@contextlib.contextmanager
def eager(options: Any) -> Iterator[Step]:
    yield model(options.small).decode


@contextlib.contextmanager
def compiled(options: Any) -> Iterator[Step]:
    made = model(options.small)
    for buffer in made.buffers():  # otherwise it skips CUDA graphs, because inputs are mutated
        torch._dynamo.mark_static_address(buffer)
    yield torch.compile(made.decode, mode="reduce-overhead", fullgraph=True)


@contextlib.contextmanager
def eager_vllm(options: Any) -> Iterator[Step]:
    yield vllm_model().decode


@contextlib.contextmanager
def compiled_vllm(options: Any) -> Iterator[Step]:
    made = vllm_model()
    for buffer in made.buffers():
        torch._dynamo.mark_static_address(buffer)
    # torch.compile does not take FlashAttention's list of results with gaps.
    one = torch.library.custom_op("benchmarks::flash_attention", _decoder().flash_attention, mutates_args=())
    one.register_fake(lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format))
    _decoder().flash_attention = one
    yield torch.compile(made.decode, mode="reduce-overhead", fullgraph=True)


@contextlib.contextmanager
def functional(options: Any) -> Iterator[Step]:
    with exportkit.load(options.package, options.device) as loaded:
        sizes = config(options.small)
        shape = (1, sizes.kv_heads, sizes.length, sizes.head_width)
        dtype = torch.float32 if options.small else torch.bfloat16
        cache = [
            tuple(torch.zeros(shape, dtype=dtype, device=options.device) for _ in "kv") for _ in range(sizes.layers)
        ]
        position = torch.zeros(1, dtype=torch.int64, device=options.device)

        def step(token: torch.Tensor) -> torch.Tensor:
            nonlocal cache
            logits, cache = loaded(token, position, cache)
            position.add_(1)
            return logits

        yield step


@contextlib.contextmanager
def session(options: Any) -> Iterator[Step]:
    with (
        exportkit.load(options.package, options.device, **options.load) as loaded,
        loaded.session(**options.sizes) as opened,
    ):
        yield opened.decode


@contextlib.contextmanager
def bare_graph(options: Any) -> Iterator[Step]:
    """A replay of a graph of the caller's, without new inputs and outputs."""
    with (
        exportkit.load(options.package, options.device, **options.load) as loaded,
        loaded.session(**options.sizes) as opened,
    ):
        own = torch.zeros(1, 1, dtype=torch.int64, device=options.device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            opened.decode(own)
        torch.cuda.synchronize()
        opened.reset()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            logits = opened.decode(own)

        def step(token: torch.Tensor) -> torch.Tensor:
            if token is not step.last:
                own.copy_(token)
                step.last = token
            graph.replay()
            return logits

        step.last = None
        yield step


ROWS: Mapping[str, Row] = {
    "eager": Row(eager),
    "torch.compile, reduce-overhead": Row(compiled),
    "package, the cache in and out": Row(functional, "passing"),
    "session": Row(session, "stateful"),
    "session, CUDA graphs": Row(session, "stateful", {"cuda_graphs": True}, gpu=True),
    "the graph alone": Row(bare_graph, "stateful", {"cuda_graphs": []}, gpu=True),
    "vLLM's kernels, eager": Row(eager_vllm, gpu=True, vllm=True),
    "vLLM's kernels, torch.compile, reduce-overhead": Row(compiled_vllm, gpu=True, vllm=True),
    "vLLM's kernels, session": Row(session, "vllm", gpu=True, vllm=True),
    "vLLM's kernels, session, CUDA graphs": Row(session, "vllm", {"cuda_graphs": True}, gpu=True, vllm=True),
    "vLLM's kernels, the graph alone": Row(bare_graph, "vllm", {"cuda_graphs": []}, gpu=True, vllm=True),
}


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(name: str, folder: Path, small: bool, operators: Sequence[Path]) -> dict[str, Any]:
    """Measures a row in this process."""
    row = ROWS[name]
    if row.vllm and row.package is None:
        for library in operators:
            torch.ops.load_library(str(library))
    device = torch.device("cpu" if small else "cuda")
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)  # creates the context
    context = _used(device)
    package = folder / f"{row.package}.pt2"
    sizes = {"batch": 1} if row.vllm else {}
    options = argparse.Namespace(small=small, device=str(device), package=package, load=row.load, sizes=sizes)
    start = time.perf_counter()
    with torch.no_grad(), row.make(options) as step:
        tokens, following = [], token
        for _ in range(TOKENS):
            following = step(following).argmax(-1, keepdim=True)
            tokens.append(int(following))
        ready = time.perf_counter() - start
        for _ in range(WARM):
            step(token)
        times = [_elapsed(step, token, device) for _ in range(ROUNDS)]
        used = _used(device)
    return {
        "name": name,
        "ms": round(statistics.median(times), 4),
        "lowest": round(min(times), 4),
        "highest": round(max(times), 4),
        "memory_mb": None if used is None or context is None else round(used - context, 1),
        "seconds_until_ready": round(ready, 1),
        "tokens": tokens,
    }


def _elapsed(step: Step, token: torch.Tensor, device: torch.device) -> float:
    """Returns the milliseconds of a call that follows another."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(CALLS):
            step(token)
        return (time.perf_counter() - start) * 1e3 / CALLS
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(CALLS):
        step(token)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / CALLS


def _used(device: torch.device) -> float | None:
    """Returns the megabytes (10^6) that nvidia-smi says are used of this process's first GPU."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = ["nvidia-smi", "-i", uuid, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return int(said.strip()) * 2**20 / 1e6


# --- the whole --------------------------------------------------------------------------------------------------------


def machine(small: bool) -> str:
    return platform.processor() or platform.machine() if small else torch.cuda.get_device_name()


def about(folder: Path, small: bool) -> dict[str, Any]:
    """What was measured, and on what."""
    with torch.device("meta"):
        sizes = llama.Llama(config(small))
    bytes_each = 4 if small else 2
    parameters = sum(each.numel() for each in sizes.parameters())
    made = {name: json.loads((folder / f"{name}.json").read_text()) for name in PACKAGES if _is_made(name, folder)}
    return {
        "machine": machine(small),
        "torch": torch.__version__,
        "parameters": parameters,
        "weights_mb": round(parameters * bytes_each / 1e6, 1),
        "cache_mb": round(sum(each.numel() for each in sizes.cache.buffers()) * bytes_each / 1e6, 1),
        "cache_length": sizes.config.length,
        "seconds": made,
    }


def _is_made(name: str, folder: Path) -> bool:
    return (folder / f"{name}.json").exists()


def table(document: Mapping[str, Any]) -> str:
    lines = [
        f"{document['machine']}, torch {document['torch']}: {document['parameters'] / 1e6:.1f} million parameters, "
        f"{document['weights_mb']} MB of weights, {document['cache_mb']} MB of cache",
        "",
        "| what | ms a token | lowest to highest | memory, MB | beside the weights |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in document["rows"]:
        memory = row["memory_mb"]
        beside = "" if memory is None else f"{memory - document['weights_mb']:.0f}"
        spread = f"{row['lowest']:.3f} to {row['highest']:.3f}"
        lines.append(f"| {row['name']} | {row['ms']:.3f} | {spread} | {memory or ''} | {beside} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the packages")
    parser.add_argument("--small", action="store_true", help="a few thousand parameters, on the CPU")
    parser.add_argument("--make", choices=PACKAGES, help="make this package and measure nothing")
    parser.add_argument("--measure", action="store_true", help="make nothing; leave out rows whose package is missing")
    parser.add_argument(
        "--vllm", type=Path, metavar="FOLDER", help="with vLLM's kernels, too: the folder of its libraries"
    )
    parser.add_argument("--row", choices=ROWS, help="measure this row alone, and print it as JSON")
    parser.add_argument("-o", "--output", type=Path, help="default: benchmarks/state_results/<GPU>.json")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    operators = libraries(options.vllm) if options.vllm else []
    if options.row:
        print(json.dumps(measure(options.row, options.folder, options.small, operators)))
        return
    names = PACKAGES if operators else PACKAGES[:2]
    for name in [options.make] if options.make else () if options.measure else names:
        if not _is_made(name, options.folder):
            make_package(name, options.folder, options.small, operators)
    if not options.make:
        _measure_all(options)


def _measure_all(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    first: dict[bool, list[int]] = {}  # the tokens of each model's first row
    made = {None, *(name for name in PACKAGES if _is_made(name, options.folder))}
    for name, row in ROWS.items():
        if row.package not in made or (options.small and row.gpu) or (row.vllm and not options.vllm):
            continue
        command = [sys.executable, "-m", "benchmarks.state", "--folder", str(options.folder), "--row", name]
        command += ["--small"] if options.small else []
        command += ["--vllm", str(options.vllm)] if options.vllm else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
        if done.returncode:
            print(f"{name}: failed, exit status {done.returncode}", file=sys.stderr)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        tokens = rows[-1].pop("tokens")
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, first.setdefault(row.vllm, tokens)))
        rows[-1]["tokens_as_the_first_row"] = sum(1 for _ in alike)
        print(f"{name}: {rows[-1]['ms']} ms", file=sys.stderr)
    document = {**about(options.folder, options.small), "rows": rows}
    slug = document["machine"].lower().replace(" ", "-")
    output = options.output or (options.folder / "small.json" if options.small else RESULTS / f"{slug}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
