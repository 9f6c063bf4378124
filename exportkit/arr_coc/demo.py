"""Runs every step on a photograph: export, package, verify, load in a fresh process, run and draw.

The photographs are those of scikit-image's wheel, each with a region for a query, so that the demo works offline.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from exportkit.arr_coc.model.region import Region
from exportkit.errors import ExportError, HostError, UsageError, WrongResultError
from exportkit.package.atomic import temporary_folder
from exportkit.package.case_files import named_tensors
from exportkit.package.manifest import Manifest
from exportkit.packaging import PackOptions, build_package
from exportkit.progress import Progress, silent
from exportkit.verify.commands import ArtifactLoaded, CallModel, ModelCalled
from exportkit.verify.options import VerifyOptions
from exportkit.verify.replay import ReplayProcess
from exportkit.verify.report import Report
from exportkit.verify.verify import verify

if TYPE_CHECKING:
    import torch


# Small ranges, so that comparing their ends takes seconds on a laptop. 512 x 512 pixels are gh = gw = 32.
DYNAMIC = ("image:0=batch[1:4]", "image:2=16*gh[4:60]", "image:3=16*gw[4:60]", "query:0=batch[1:4]")
CALLS = 20
SHAPES = 4


@dataclass(frozen=True)
class DemoStep:
    """One step: its name, its time and its result in words."""

    name: str
    seconds: float
    detail: str


@dataclass(frozen=True)
class DemoResult:
    """The steps and the written files."""

    steps: tuple[DemoStep, ...]
    artifact: Path
    package: Path
    picture: Path


def run_demo(folder: Path, *, photograph: str = "astronaut", progress: Progress = silent) -> DemoResult:
    """Exports, packages, verifies and runs the ARR-COC model on one of PHOTOGRAPHS, with an encoder without training.

    The folder is made if it does not exist.

    Raises:
        HostError: scikit-image is not installed, or there is no compiler.
        ExportError: The package's outputs differ from eager's.
    """
    progress("importing torch and the model")
    import torch

    from exportkit.arr_coc.demo import REGION_MODEL, load_photograph
    from exportkit.arr_coc.model import region_query
    from exportkit.arr_coc.model.overlay import draw_overlay, save_overlay
    from exportkit.export.artifact import export_aoti
    from exportkit.export.export_options import TraceOptions
    from exportkit.export.models.resolve import resolve

    steps: list[DemoStep] = []
    clock = _Clock(steps)
    photo = load_photograph(photograph)
    folder.mkdir(parents=True, exist_ok=True)
    artifact, package = folder / "demo_aoti.pt2", folder / "demo.pt2"
    resolved = resolve("arr-coc", model_kwargs=REGION_MODEL)
    model: Any = resolved.spec.model
    height, width = photo.pixels.shape[2:]
    clock.done("set up", f"torch {torch.__version__}; {photograph}, {width} x {height} pixels")

    manifest = export_aoti(resolved, artifact, TraceOptions(dynamic=DYNAMIC, name="arr_coc"), progress=progress)
    target = manifest.targets[0]
    clock.done("export", f"{artifact}: {target.name}, {len(manifest.operators)} operators, {_size(artifact)}")

    manifest, report = build_package([artifact], package, PackOptions(_CASES), progress=progress)
    _require(report)
    clock.done("package", f"{package}: with {len(manifest.libraries)} library, {_size(package)}; replayed its cases")

    report = verify(package, VerifyOptions(against="eager", shapes=SHAPES), progress=progress)
    _require(report)
    clock.done("verify", f"agrees with eager at {len(report.checks)} sizes, including the ends of the ranges")

    progress(f"asking the packaged model what is like {photo.subject}")
    with torch.no_grad():
        query = region_query(model, photo.pixels, photo.region)
    loaded, outputs, calls = _run_elsewhere(package, manifest, [photo.pixels, query])
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
    package: Path, manifest: Manifest, inputs: list[torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Runs the package in a fresh process. Returns its load time, its outputs by name, and the time of each call."""
    from safetensors.torch import load_file, save_file

    with temporary_folder(None, "exportkit-demo") as folder:
        given, returned = folder / "inputs.safetensors", folder / "outputs.safetensors"
        save_file(named_tensors("0.input", inputs), given)
        target = manifest.targets[0].name
        with ReplayProcess.of_target(package, manifest, _CASES, target=target, device="cpu") as replay:
            loaded = replay.load()
            if not isinstance(loaded, ArtifactLoaded):
                raise ExportError(loaded.message)
            calls = []
            for _ in range(CALLS):
                called = replay.call(CallModel(str(given), str(returned)), doing="running the model")
                if not isinstance(called, ModelCalled):
                    raise ExportError(called.message)
                calls.append(called.seconds)
        tensors = load_file(returned)
    outputs = {output.name: tensors[f"0.output.{i}"] for i, output in enumerate(manifest.call.outputs)}
    return loaded.seconds, outputs, calls


def _require(report: Report | None) -> None:
    """Raises WrongResultError if a check failed."""
    if report is not None and report.wrong and (check := report.failure):
        raise WrongResultError(f"{check.against}, {check.label}: {check.verdict.message}")


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.2f} MB"


@dataclass(frozen=True)
class Photograph:
    """A picture, float32 [1, 3, H, W] in [0, 1] of whole patches, and the region to find similar ones for."""

    pixels: Tensor
    region: Region
    subject: str


@dataclass(frozen=True)
class _Entry:
    region: Region  # in the enlarged picture
    subject: str
    enlarge: int = 1


_ENTRIES = {
    "astronaut": _Entry(Region(70, 180, 110, 80), "the astronaut's face"),
    "chelsea": _Entry(Region(205, 285, 85, 110), "one of the cat's eyes", enlarge=2),
    "coffee": _Entry(Region(150, 210, 60, 170), "the coffee in the cup"),
}
PHOTOGRAPHS = tuple(_ENTRIES)

# For queries made from a region: the fit to the query has the largest weight, and budgets favour the best patches.
REGION_MODEL: dict[str, Any] = {
    "encoder": "filters",
    "entropy_weight": 0.2,
    "salience_weight": 0.3,
    "alignment_weight": 0.5,
    "gamma": 3.0,
}
"""Arguments of `build` and `export_spec` for a query made from a region of a photograph."""


def load_photograph(name: str = "astronaut", *, patch_size: int = 16) -> Photograph:
    """Returns one of PHOTOGRAPHS, cropped to whole patches. HostError: scikit-image is not installed."""
    if name not in _ENTRIES:
        raise UsageError(f"photograph must be one of {', '.join(PHOTOGRAPHS)}, got {name!r}")
    try:
        from skimage import data
    except ImportError as error:
        said = "the photographs come with scikit-image, which is not installed"
        raise HostError(said, hint="Run `pip install 'exportkit[demo]'`.") from error
    entry = _ENTRIES[name]
    return Photograph(crop_to_patches(getattr(data, name)(), patch_size, entry.enlarge), entry.region, entry.subject)


def crop_to_patches(picture: np.ndarray, patch_size: int, enlarge: int = 1) -> Tensor:
    """Converts uint8 [H, W, 3] to float32 [1, 3, H', W'] in [0, 1], enlarged, then cut at the right and the bottom."""
    pixels = torch.tensor(picture[..., :3]).permute(2, 0, 1).unsqueeze(0).float() / 255
    if enlarge > 1:
        pixels = functional.interpolate(pixels, scale_factor=enlarge, mode="bicubic", align_corners=False).clamp(0, 1)
    height, width = (size // patch_size * patch_size for size in pixels.shape[2:])
    return pixels[:, :, :height, :width].contiguous()
