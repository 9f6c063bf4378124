"""The whole path on a photograph: export, package, verify, load where nothing else is installed, run, and draw."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exportkit.errors import ExportError
from exportkit.package.atomic import temporary_folder
from exportkit.verify.outcomes import Crashed, TimedOut
from exportkit.verify.packaging import build_package
from exportkit.verify.verify import VerifyOptions, verify
from exportkit.verify.worker import Worker

if TYPE_CHECKING:
    import torch

# Small ranges, so that comparing at their ends takes seconds on a laptop. 512 x 512 pixels are gh = gw = 32.
DYNAMIC = ("image:0=batch[1:4]", "image:2=16*gh[4:60]", "image:3=16*gw[4:60]", "query:0=batch[1:4]")
CALLS = 20
SHAPES = 4
_TIMEOUT = 600.0


@dataclass(frozen=True)
class DemoStep:
    """One step: what was done, what it took, and what there is to say of it."""

    name: str
    seconds: float
    detail: str


@dataclass(frozen=True)
class DemoResult:
    """All of them, and the files that were written."""

    steps: tuple[DemoStep, ...]
    artifact: Path
    package: Path
    picture: Path


def run_demo(
    folder: Path, *, photograph: str = "astronaut", progress: Callable[[str], None] = lambda step: None
) -> DemoResult:
    """Takes the ARR-COC model, with its encoder that needs no training, from source to a picture.

    Args:
        folder: Where the artifact, the package and the picture are written; made if it does not exist.
        photograph: One of exportkit.models.arr_coc.photographs.PHOTOGRAPHS.
        progress: Told what is about to be done.

    Raises:
        HostError: scikit-image is not installed, or there is no compiler.
        ExportError: The package does not do what eager does.
    """
    progress("importing torch and the model")
    import torch

    from exportkit.export.artifact import export_aoti
    from exportkit.export.model import resolve
    from exportkit.models.arr_coc import region_query
    from exportkit.models.arr_coc.overlay import draw_overlay, save_overlay
    from exportkit.models.arr_coc.photographs import REGION_MODEL, load_photograph

    steps: list[DemoStep] = []
    clock = _Clock(steps)
    photo = load_photograph(photograph)
    folder.mkdir(parents=True, exist_ok=True)
    artifact, package = folder / "demo_aoti.pt2", folder / "demo.pt2"
    resolved = resolve("arr-coc", model_kwargs=REGION_MODEL)
    model: Any = resolved.spec.model
    height, width = photo.pixels.shape[2:]
    clock.done("set up", f"torch {torch.__version__}; {photograph}, {width} x {height} pixels")

    manifest = export_aoti(resolved, artifact, dynamic=DYNAMIC, name="arr_coc", progress=progress)
    target = manifest.targets[0]
    clock.done("export", f"{artifact}: {target.name}, {len(manifest.operators)} operators, {_size(artifact)}")

    manifest, report = build_package([artifact], package, verify_options=_CASES, progress=progress)
    _require(report)
    clock.done("package", f"{package}: with {len(manifest.libraries)} library, {_size(package)}; replayed its cases")

    report = verify(package, VerifyOptions(against="eager", shapes=SHAPES), progress=progress)
    _require(report)
    clock.done("verify", f"agrees with eager at {len(report.checks)} sizes, the ends of the ranges among them")

    progress(f"asking the packaged model: where is more like {photo.subject}?")
    with torch.no_grad():
        query = region_query(model, photo.pixels, photo.region)
    loaded, outputs, calls = _run_elsewhere(package, [photo.pixels, query], [o.name for o in manifest.call.outputs])
    clock.done(
        "load and run",
        f"in a fresh process: loaded in {loaded * 1e3:.0f} ms; first call {calls[0] * 1e3:.1f} ms, "
        f"then {statistics.median(calls[1:]) * 1e3:.1f} ms (median of {len(calls) - 1})",
    )

    picture = folder / "demo.png"
    progress("drawing")
    patch_size = model.encoder.patch_size
    overlay = draw_overlay(photo.pixels, outputs, patch_size=patch_size, region=photo.region, subject=photo.subject)
    save_overlay(overlay, picture)
    kept, total = outputs["indices"].shape[1], outputs["relevance"].shape[1]
    clock.done("draw", f"{picture}: {kept} of {total} patches kept, {int(outputs['budgets'].sum())} tokens")
    return DemoResult(tuple(steps), artifact, package, picture)


_CASES = VerifyOptions(against="cases")


class _Clock:
    def __init__(self, steps: list[DemoStep]) -> None:
        self._steps = steps
        self._start = time.monotonic()

    def done(self, name: str, detail: str) -> None:
        now = time.monotonic()
        self._steps.append(DemoStep(name, now - self._start, detail))
        self._start = now


def _run_elsewhere(
    package: Path, inputs: list[torch.Tensor], names: list[str]
) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Seconds to load, the outputs by name, and the seconds of each call, in a process that has the package only."""
    from safetensors.torch import load_file, save_file

    with temporary_folder(None, "exportkit-demo") as folder:
        given, returned = folder / "inputs.safetensors", folder / "outputs.safetensors"
        save_file({f"input.{i}": tensor.contiguous() for i, tensor in enumerate(inputs)}, given)
        load = {"do": "load", "artifact": str(package.resolve()), "program": False, "device": "cpu", "tf32": False}
        with Worker("exportkit.verify.child", folder=folder, cwd=folder) as worker:
            none: dict[str, Any] = {"libraries": [], "blocked": [], "public_keys": None, "signature": None}
            loaded = _ask(worker, load | none, "loading the package")
            call = {"do": "run", "inputs": str(given), "outputs": str(returned)}
            calls = [_ask(worker, call, "running the model")["seconds"] for _ in range(CALLS)]
        tensors = load_file(returned)
    return loaded["seconds"], {name: tensors[f"output.{i}"] for i, name in enumerate(names)}, calls


def _ask(worker: Worker, command: dict[str, Any], doing: str) -> dict[str, Any]:
    answer = worker.ask(command, doing=doing, timeout=_TIMEOUT)
    if isinstance(answer, (Crashed, TimedOut)):
        raise ExportError(answer.message)
    if "error" in answer:
        raise ExportError(f"{doing}: {answer['error']}: {answer['detail']}")
    return answer


def _require(report: Any) -> None:
    """The demo goes on only with a package that passed."""
    if report.failure is not None:
        check = report.failure
        raise ExportError(f"{check.against}, {check.label}: {check.verdict.message}")


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.2f} MB"
