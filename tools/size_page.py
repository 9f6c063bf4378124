"""docs/models.md, from the results of `python -m tools.sizes_table`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tools.size_catalogue import SIZED

Results = dict[str, Any]
_STEPS = ("export", "package", "verify", "load")
_WAYS = ("exportkit", "eager", "compile")

_TEXT = """\
# Models of real sizes

Written by `make docs` from [one run](../benchmarks/sizes) of `python -m tools.sizes_table` on {machine}, torch {torch},
transformers {transformers}, {cores} cores for each GPU. The weights are random, in bfloat16, made on the GPU. The batch
is 1, or 8 images; the length of texts varies.

- **Seconds** and memory: of `export`, `package --no-verify`, `verify` and a load, each in a process of its own.
- **GPU**: the peak, without the {context:.1f} GB that an empty process has there, as a multiple of the weights.
- **Host**: the peak in GB, without mapped files, with all children; compilers have {compilers:.0f} GB of it.
- **Milliseconds** of a call at the greatest size: the package, the same as a CUDA graph, eager, `torch.compile`.

Two models call [paged_cache](../examples/paged_cache)'s operator for attention; `torch.compile` and eager call it, too.

| model | parameters, 10⁹ | seconds | GPU | host, GB | ms |
| --- | ---: | ---: | ---: | ---: | ---: |
"""


def page(document: Results) -> str:
    """Returns the page."""
    rows = [(SIZED[name].title, result) for name, result in document["models"].items() if name in SIZED]
    rows.sort(key=lambda row: -row[1].get("parameters", 0))
    context = document.get("context", {})
    empty = context.get("gpu", 0) - context.get("before", 0)
    versions = document["versions"]
    small = min((result["memory"]["export"]["all"] - result["weights"] for _, result in rows if "weights" in result))
    text = _TEXT.format(
        machine=f"an {document['machine'].removeprefix('NVIDIA ')}" if "machine" in document else "a CPU",
        torch=versions["torch"].partition("+")[0],
        transformers=versions["transformers"],
        cores=document["cores"],
        context=empty,
        compilers=max(small, 0),
    )
    return text + "".join(f"{_row(title, result, empty)}\n" for title, result in rows)


def _row(title: str, result: Results, empty: float) -> str:
    if "parameters" not in result:
        return f"| {title} |  | {result['ended']} |  |  |  |"
    seconds = {**result["seconds"], "load": result.get("loaded", {}).get("load")}
    memory = result["memory"]
    gpu = {step: (memory[step]["gpu"] - empty) / result["weights"] for step in _STEPS if step in memory}
    host = {step: memory[step]["all"] for step in _STEPS if step in memory}
    speed = result.get("speed", {})
    times = [speed.get(way, {}).get("call") for way in _WAYS]
    times.insert(1, speed.get("exportkit", {}).get("kernels"))
    cells = [
        f"{result['parameters']:.2f}",
        _joined((seconds.get(step) for step in _STEPS), 0),
        _joined((max(gpu.get(step, 0), 0) for step in _STEPS), 2),
        _joined((host.get(step) for step in _STEPS), 1),
        _joined(times, 1),
    ]
    return f"| {title} | {' | '.join(cells)} |"


def _joined(values: Iterable[float | None], digits: int) -> str:
    return "/".join("-" if value is None else f"{value:.{digits}f}" for value in values)
