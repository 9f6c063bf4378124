"""Loads a package on every device and warms it up, in a thread that is not the event loop's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from exportkit.errors import ExportkitError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Call, Dimension
from exportkit.runtime.loader import load
from exportkit.runtime.model import Model
from exportkit.serve.batching.tickets import BatchLimits
from exportkit.serve.engine.batchable import Batching, batch_dimension
from exportkit.serve.engine.folder import PackageFile
from exportkit.serve.engine.loaded_package import LoadedCopies, LoadedPackage
from exportkit.serve.engine.model_copy import ModelCopy, SharedModel
from exportkit.serve.engine.model_description import ModelDescription
from exportkit.serve.engine.servable import servable
from exportkit.serve.engine.step_batches import step_dimension, try_steps
from exportkit.serve.engine.warm_up import answer_cases, answer_sequences, try_batches
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.serve_options import LoadOptions

_NOT_SHOWN = "the warm-up is off, which would show that rows do not influence one another"


def load_copies(
    package: PackageFile,
    options: LoadOptions,
    limits: BatchLimits,
    weights: Path | None,
    sequences: SequenceLimits | None = None,
) -> LoadedPackage:
    """Loads a package, warms it up, and finds out whether its requests may run together, method by method.

    Args:
        package: The package.
        options: How it is loaded.
        limits: What may run together.
        weights: A safetensors file that replaces the package's weights.
        sequences: The limits of sequences. Default: those of an instance.

    Raises:
        ExportkitError: The package cannot be loaded, the weights do not fit, no method can be served, or one answers a
            recorded call wrongly.
    """
    sequences = sequences or SequenceLimits()
    devices = [_resolved(device, package.path) for device in options.devices]
    with contextlib.ExitStack() as undo:
        models: list[SharedModel] = []
        for device in devices:
            models.append(SharedModel(partial(_load, package.path, device, options, weights), package.name))
            undo.callback(models[-1].leave)
        manifest = models[0].model.manifest
        offered = servable(package.name, manifest, sequences=sequences.most > 0)
        if options.warm_up and any(manifest.method(method).state for method in offered.names):
            for model in models:
                answer_sequences(model, compared=weights is None)
        loaded = []
        for method, name in offered.names.items():
            copies = [ModelCopy(model, method) for model in models]
            for copy in copies:
                undo.callback(copy.close)
            if copies[0].method.state:
                batching = _of_steps(copies, limits, options)
            else:
                batching = _by_manifest(copies[0].method.call, limits)
                for copy in copies:
                    batching = _warmed_up(copy, batching, options, weights)
            described = ModelDescription(
                name=name,
                version=package.version or manifest.version,
                manifest=manifest,
                batching=batching,
                limits=limits,
                devices=tuple(str(copy.device) for copy in copies),
                runners=options.runners or max(map(_default_runners, devices)),
                weights=weights.name if weights else None,
                method=method,
                offered=offered,
                sequences=sequences,
            )
            loaded.append(LoadedCopies(tuple(copies), described, options.warm_up))
        undo.pop_all()
        return LoadedPackage(tuple(loaded), offered, tuple(models))


def _resolved(device: str, path: Path) -> str:
    """Returns `cpu` where `auto` can be nothing else."""
    if device != "auto":
        return device
    with PackageReader(path) as reader:
        has_code = any(target.device == "cuda" for target in reader.manifest.targets)
    return "auto" if has_code and torch.cuda.is_available() else "cpu"


def _default_runners(device: str) -> int:
    """Returns how many batches run at the same time."""
    return 1 if device == "cpu" else 2


def _load(path: Path, device: str, options: LoadOptions, weights: Path | None) -> Model:
    model = load(
        path,
        device,
        options.runners or _default_runners(device),
        public_key=list(options.public_keys) or None,
        isolate=options.isolate,
        cuda_graphs=options.cuda_graphs,
    )
    if weights is not None:
        try:
            model.swap_weights(weights)
        except ExportkitError:
            model.close()
            raise
    return model


def _by_manifest(call: Call, limits: BatchLimits) -> Batching:
    """Returns how requests may run together if rows are independent."""
    found = batch_dimension(call)
    if isinstance(found, str):
        return Batching.impossible(found)
    return _within(found, limits)


def _within(found: Dimension, limits: BatchLimits) -> Batching:
    most = found.max if limits.max_rows is None else min(found.max, limits.max_rows)
    if most < 2 * max(found.min, 1):
        return Batching.impossible(f"batches have at most {most} rows, which leaves no room for two requests")
    return Batching(found, most)


def _of_steps(copies: Sequence[ModelCopy], limits: BatchLimits, options: LoadOptions) -> Batching:
    """Returns how steps of different sequences may run together."""
    copy = copies[0]
    found = step_dimension(copy.model.manifest, copy.method)
    if isinstance(found, str):
        return Batching.impossible(found)
    if options.isolate:
        return Batching.impossible("the state is in a worker process, so each step runs alone")
    batching = _within(found, limits)
    for each in copies:
        if batching.dimension is not None:
            if not options.warm_up:
                return Batching.impossible(_NOT_SHOWN)
            tried = try_steps(each, batching.dimension, batching.max_rows)
            batching = replace(tried, bit_equal=tried.bit_equal and batching.bit_equal)
    return batching


def _warmed_up(copy: ModelCopy, batching: Batching, options: LoadOptions, weights: Path | None) -> Batching:
    """Runs the recorded cases on a copy. Returns how requests may run together on it and on the copies before."""
    if not options.warm_up:
        return Batching.impossible(_NOT_SHOWN)
    answer_cases(copy, compared=weights is None)
    if batching.dimension is None:
        return batching
    tried = try_batches(copy, batching.dimension, batching.max_rows)
    return replace(tried, bit_equal=tried.bit_equal and batching.bit_equal)
