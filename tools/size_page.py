"""docs/models.md, from the results of `python -m tools.sizes_table`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tools.size_catalogue import SIZED

Results = dict[str, Any]
_SECONDS = ("export", "package", "verify", "load")
_MEMORY = ("export", "verify", "load")  # packaging needs no GPU, and 30 MB of the host
_WAYS = ("exportkit", "eager", "compile")

_TEXT = """\
# Models of real sizes

One run of `python -m tools.sizes_table` on {machine}, torch {torch}, transformers {transformers}, {cores} cores a GPU
([results](../benchmarks/sizes/h200.json)). [The weights](../tools/size_catalogue.py) are random, in bfloat16. Qwen 3
1.7B and Llama 3.2 1B call the operator of [paged_cache](../examples/paged_cache).

- Seconds: `export`, `package --no-verify`, `verify`, a later load.
- GPU: the peak of export, verify and load, divided by the weights, without the {context:.2f} GB of an empty process.
- Host: the same peaks in GB, with compilers, without mapped files.
- Milliseconds of a call at the greatest sizes: package, eager, `torch.compile`.

Above 1.3: float64 activations of references, or a copy of the largest embedding.
Not in the table: {missing}.
Mamba 2 with random weights in bfloat16 is 0.6 of an answer from float64 in eager, too.

| model | 10⁹ parameters | seconds | GPU | host | ms |
| --- | ---: | ---: | ---: | ---: | ---: |
"""


def page(document: Results) -> str:
    """Returns the page."""
    models, context, versions = document["models"], document.get("context", {}), document["versions"]
    rows = [(SIZED[name].title, result) for name, result in models.items() if name in SIZED and result["ended"] == "ok"]
    rows.sort(key=lambda row: -row[1].get("parameters", 0))
    empty = context.get("gpu", 0) - context.get("before", 0)
    text = _TEXT.format(
        machine=document.get("machine", "CPU").removeprefix("NVIDIA "),
        torch=versions["torch"].partition("+")[0],
        transformers=versions["transformers"],
        cores=document["cores"],
        context=empty,
        missing=", ".join(_missing(models)) or "none",
    )
    return text + "".join(f"{_row(title, result, empty)}\n" for title, result in rows)


def _missing(models: Results) -> Iterator[str]:
    for name, model in SIZED.items():
        if (ended := models.get(name, {}).get("ended", "not run")) != "ok":
            yield f"{model.title} ({ended})"


def _row(title: str, result: Results, empty: float) -> str:
    seconds = {**result["seconds"], "load": result.get("loaded", {}).get("load")}
    memory = {step: result["memory"].get(step) for step in _MEMORY}
    weights, speed = result["weights"], result.get("speed", {})
    cells = [
        f"{result['parameters']:.2f}",
        _joined((seconds.get(step) for step in _SECONDS[:-1]), 0) + "/" + _joined([seconds["load"]], 1),
        _joined((each and max(each["gpu"] - empty, 0) / weights for each in memory.values()), 2),
        _joined((each and each["all"] for each in memory.values()), 1),
        _joined((speed.get(way, {}).get("call") for way in _WAYS), 1),
    ]
    return f"| {title} | {' | '.join(cells)} |"


def _joined(values: Iterable[float | None], digits: int) -> str:
    return "/".join("-" if value is None else f"{value:.{digits}f}" for value in values)
