"""Small models on one core of a CPU: milliseconds a call, by all that can run them.

    python -m benchmarks.small_models --folder build/small [-o results.json]

The detector of examples/speech in a session of as many streams, and the models of benchmarks/models/small.py. ONNX
Runtime runs the detector's own file, as its publisher ships it, and of the others what torch.onnx.export writes. All
have one thread, run in one process, pinned to one core, and take turns; the table has medians and the JSON minima too.
exportkit-run measures the same packages without Python, in processes of its own that come right after.

Packages and ONNX files are made in --folder, unless they are there. --make makes them and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import exportkit
from benchmarks.models import small
from exportkit.bench.runs import describe

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "speech"))
from exportkit_speech import detector  # noqa: E402 (its folder is put on the path first)

RESULTS = ROOT / "benchmarks" / "small_results"
SOURCES = {
    "detector": "examples/speech/exportkit_speech/detector.py:spec",
    "step": "benchmarks/models/small.py:step",
    "perceptron": "benchmarks/models/small.py:perceptron",
    "spotter": "benchmarks/models/small.py:spotter",
}
BATCHES = (1, 16, 64, 256)
ROUNDS, SAMPLE = 40, 3e-3  # and about how many seconds a sample takes

Call = Callable[[], Any]


def make(name: str, folder: Path) -> None:
    """Makes a package, and an ONNX file for the models whose publisher has none."""
    exported, packaged = folder / f"{name}_aoti.pt2", folder / f"{name}.pt2"
    if not packaged.exists():
        commands = [["export", SOURCES[name], "-o", str(exported)], ["package", str(exported), "-o", str(packaged)]]
        for command in commands:
            subprocess.run([sys.executable, "-m", "exportkit", *command], check=True, cwd=ROOT, stdout=sys.stderr)
        exported.unlink()
    onnx = folder / f"{name}.onnx"
    if name != "detector" and not onnx.exists():
        spec = getattr(small, name)()
        shapes = tuple({0: torch.export.Dim("batch", min=1, max=256)} for _ in spec.example_inputs)
        program = torch.onnx.export(spec.model, spec.example_inputs, dynamo=True, dynamic_shapes=shapes)
        assert program is not None
        program.save(onnx)


def inputs_of(name: str, batch: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    examples = (torch.empty(2, detector.SAMPLES),) if name == "detector" else getattr(small, name)().example_inputs
    return tuple(torch.randn(batch, *each.shape[1:]) / 8 for each in examples)


# --- what runs a model ------------------------------------------------------------------------------------------------


def eager(name: str, batch: int) -> torch.nn.Module:
    return detector.trained(batch) if name == "detector" else getattr(small, name)().model


@contextlib.contextmanager
def calls(name: str, batch: int, folder: Path) -> Iterator[dict[str, Call]]:
    """Yields what runs the model: functions that call it once."""
    inputs = inputs_of(name, batch)
    torch._dynamo.reset()  # it would compile for any batch after the second
    model = eager(name, batch)
    compiled = torch.compile(eager(name, batch))
    with torch.inference_mode(), exportkit.load(folder / f"{name}.pt2", "cpu") as loaded:
        opened = loaded.session(streams=batch) if name == "detector" else loaded
        found: dict[str, Call] = {
            "package": lambda: opened(*inputs),
            "eager": lambda: model(*inputs),
            "torch.compile": lambda: compiled(*inputs),
        }
        if (call := _onnx_runtime(name, batch, folder, inputs)) is not None:
            found["ONNX Runtime"] = call
        yield found


def _onnx_runtime(name: str, batch: int, folder: Path, inputs: Sequence[torch.Tensor]) -> Call | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    file = detector.published("silero_vad.onnx") if name == "detector" else folder / f"{name}.onnx"
    if not file.exists():
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    given = [each.numpy() for each in inputs]
    if name == "detector":  # it takes the end of the last chunk and the state, and returns the state
        width = detector.CONTEXT + detector.SAMPLES
        state = torch.zeros(2, batch, detector.WIDTH)
        given = [torch.randn(batch, width).div(8).numpy(), state.numpy(), torch.tensor(16_000).numpy()]
        feed = dict(zip(("input", "state", "sr"), given))
    else:
        feed = dict(zip((each.name for each in session.get_inputs()), given))
    return lambda: session.run(None, feed)


def without_python(name: str, batch: int, folder: Path, seconds: float) -> float:
    """Returns the median milliseconds of a call by exportkit-run."""
    file = folder / f"{name}-{batch}.safetensors"
    package = folder / f"{name}.pt2"
    with exportkit.load(package, "cpu") as loaded:
        names = [each.name for each in loaded.manifest.method().call.inputs]
    safetensors.torch.save_file(dict(zip(names, inputs_of(name, batch))), file)
    program = Path(exportkit.__path__[0]) / "bin" / "exportkit-run"
    command = [program, package, "--device", "cpu", "--input", file, "--output", file.with_suffix(".out")]
    command += ["--bench", str(seconds), "--json"]
    if name == "detector":
        command += ["--session", f"streams={batch}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return float(json.loads(said)["bench"]["median_ms"])


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(found: dict[str, Call]) -> dict[str, dict[str, float]]:
    """Times the calls in turns."""
    repeats = {}
    for what, call in found.items():
        for _ in range(10):
            call()
        start = time.perf_counter()
        call()
        repeats[what] = max(1, round(SAMPLE / (time.perf_counter() - start)))
    samples: dict[str, list[float]] = {what: [] for what in found}
    for _ in range(ROUNDS):
        for what, call in found.items():
            start = time.perf_counter()
            for _ in range(repeats[what]):
                call()
            samples[what].append((time.perf_counter() - start) * 1e3 / repeats[what])
    return {
        what: {"ms": round(statistics.median(times), 4), "lowest": round(min(times), 4)}
        for what, times in samples.items()
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(what for row in rows for what in row["times"]))
    lines = [f"| model | batch | {' | '.join(names)} |", "| --- |" + " ---: |" * (len(names) + 1)]
    for row in rows:
        cells = [f"{row['times'][what]['ms']:.3f}" if what in row["times"] else "" for what in names]
        lines.append(f"| {row['model']} | {row['batch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the packages")
    parser.add_argument("--make", action="store_true", help="make the packages and measure nothing")
    parser.add_argument("--model", choices=SOURCES, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=2.0, help="that exportkit-run measures each size for")
    parser.add_argument("-o", "--output", type=Path, help="default: small.json in the folder")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    names = options.model or list(SOURCES)
    for name in names:
        make(name, options.folder)
    if options.make:
        return
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows = []
    for name in names:
        for batch in BATCHES:
            with calls(name, batch, options.folder) as found:
                times = measure(found)
            alone = without_python(name, batch, options.folder, options.seconds)
            times["exportkit-run"] = {"ms": round(alone, 4)}
            rows.append({"model": name, "batch": batch, "times": times})
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
    document = {"machine": describe(torch.device("cpu")).cpu, "torch": torch.__version__, "rows": rows}
    output = options.output or options.folder / "small.json"
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
