"""The tables of serving in docs/performance.md, from benchmarks/serve/results. `tools.results_tables` writes them."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

from benchmarks.serve.load_tables import Round, beside, figure, median, ms, same_rows
from tools.generated import ROOT

RESULTS = ROOT / "benchmarks" / "serve" / "results"
_EPYC, _EPYC_TWO, _XEON = "AMD EPYC, one core", "AMD EPYC, two cores", "Intel Xeon, two cores"
_HOST, _H200 = "host of a GPU, 16 cores", "H200, 16 cores"


class Run(NamedTuple):
    """A file of results.

    Attributes:
        file: Its name without the ending.
        model: The model and its requests.
        machine: Where the server ran.
    """

    file: str
    model: str
    machine: str


EIGHT = Run("load-vit-small-h200-8", "the same, requests of 8 images", _H200)
RUNS = (
    Run("load-vit-tiny-cpu", "ARR-COC with ViT-tiny, 224x224 (0.6 MB), batches of at most 8", _EPYC),
    Run(
        "load-arr-coc-cpu-shared-cores-32-alone", "ARR-COC without encoder, 512x512 (3.15 MB), batches of 1", _EPYC_TWO
    ),
    Run("load-arr-coc-cpu-shared-cores-32", "the same, batches of at most 4", _EPYC_TWO),
    Run("load-arr-coc-cpu-shared-cores-14-alone", "224x224 (0.6 MB), batches of 1", _EPYC_TWO),
    Run("load-arr-coc-cpu-shared-cores-14", "the same, batches of at most 4", _EPYC_TWO),
    Run("load-arr-coc-16-cores-14-alone", "224x224, batches of 1", _HOST),
    Run("load-arr-coc-16-cores-14", "the same, batches of at most 4", _HOST),
    Run("load-vit-small-h200-1", "ARR-COC with ViT-small, bfloat16, 448x448 (1.2 MB), batches of 1", _H200),
    Run("load-vit-small-h200-1-of-8", "ARR-COC with ViT-small, bfloat16, 1 image, batches of at most 8", _H200),
    EIGHT,
    Run("load-vit-small-h200-64", "the same, requests of 64 images", _H200),
)
"""Requests at saturation, as docs/performance.md shows them."""

ENGINES = (
    ("load-arr-coc-cpu-filled", "echo", "an ASGI application that only reads the body", _XEON),
    ("load-arr-coc-cpu-filled", "exportkit", "exportkit serve", _XEON),
    ("load-arr-coc-cpu", "echo", "an ASGI application that only reads the body", _EPYC),
    ("load-arr-coc-cpu", "ray", "Ray Serve, a plain deployment", _EPYC),
    ("load-arr-coc-cpu", "litserve", "LitServe 0.2.19", _EPYC),
    ("load-arr-coc-cpu", "kserve", "KServe's SDK 0.21, binary tensors", _EPYC),
)
"""The file, the engine in it, its title and its machine, for one request at a time."""


def serving_section() -> str:
    """Returns both tables: one request at a time beside other engines, and saturation."""
    lines = [
        "| one request at a time | on | p50 | p99 | beside the model | CPU a request | rows/s at saturation |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for file, engine, title, machine in ENGINES:
        rounds = load(file)
        p50, p99, cpu = (figure(engine, "one", name) for name in ("p50", "p99", "cpu"))
        rate = median(rounds, figure(engine, "saturation", "rows_per_second"))
        cells = [
            *(ms(median(rounds, one)) for one in (p50, p99, beside(engine), cpu)),
            "-" if math.isnan(rate) else f"{rate:.0f}",
        ]
        lines.append(f"| {title} | {machine} | {' | '.join(cells)} |")
    lines += [
        "",
        "| at saturation: rows/s, and of direct calls | on | over HTTP |",
        "| --- | --- | ---: |",
    ]
    lines += [f"| {run.model} | {run.machine} | {saturation(run)} |" for run in RUNS]
    return "\n".join(lines) + "\n"


def saturation(run: Run) -> str:
    """Returns the rows a second, and their part of direct calls."""
    rounds = load(run.file)
    rate = median(rounds, figure("exportkit", "saturation", "rows_per_second"))
    return f"{rate:.0f}, {median(rounds, lambda one: same_rows(one, 'exportkit')):.2f}"


def load(file: str) -> list[Round]:
    """Returns the rounds of a file."""
    rounds: list[Round] = json.loads((RESULTS / f"{file}.json").read_text())
    return rounds
