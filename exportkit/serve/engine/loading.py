"""Loads a package on every device and warms it up, in a thread that is not the event loop's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from exportkit.errors import ExportkitError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import PackagedMethod
from exportkit.runtime.loader import load
from exportkit.runtime.model import Model
from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine.folder import PackageFile
from exportkit.serve.engine.model_description import Batching, ModelDescription
from exportkit.serve.engine.model_replica import ModelReplica
from exportkit.serve.engine.servable import Servable, servable
from exportkit.serve.engine.warm_up import answer_cases
from exportkit.serve.sequences.table import SequenceLimits
from exportkit.serve.serve_options import LoadOptions

_ANY_ROWS = 2**62  # a method allows fewer


@dataclass(frozen=True, eq=False)
class LoadedPackage:
    """A package that a thread has loaded and warmed up.

    Attributes:
        replicas: The package on each device.
        methods: The methods that are served.
        offered: What is served and what is not.
        warm_up: Whether the runners run a recorded case first.
    """

    replicas: tuple[ModelReplica, ...]
    methods: tuple[ModelDescription, ...]
    offered: Servable
    warm_up: bool = True

    def close(self) -> None:
        """Frees the replicas. Blocks."""
        for replica in self.replicas:
            replica.close()


def load_replicas(
    package: PackageFile, options: LoadOptions, limits: BatchLimits, weights: Path | None, sequences: SequenceLimits
) -> LoadedPackage:
    """Loads a package, warms it up, and finds out whether its requests may run together, method by method.

    Args:
        package: The package.
        options: How it is loaded.
        limits: What may run together.
        weights: A safetensors file that replaces the package's weights.
        sequences: The limits of sequences.

    Raises:
        ExportkitError: The package cannot be loaded, the weights do not fit, no method can be served, or one answers a
            recorded call wrongly.
    """
    devices = [_resolved(device, package.path) for device in options.devices]
    with contextlib.ExitStack() as undo:
        replicas: list[ModelReplica] = []
        for device in devices:
            replicas.append(ModelReplica(partial(_load, package.path, device, options, weights)))
            undo.callback(replicas[-1].close)
        manifest = replicas[0].model.manifest
        offered = servable(package.name, manifest, sequences=sequences.most > 0)
        served = [manifest.method(name) for name in offered.names]
        if options.warm_up:
            for replica in replicas:
                answer_cases(replica, served, compared=weights is None)
        methods = tuple(
            ModelDescription(
                name=offered.names[method.name],
                version=package.version or manifest.version,
                manifest=manifest,
                batching=_batching(replicas, method, limits, options),
                limits=limits,
                devices=tuple(str(replica.device) for replica in replicas),
                runners=options.runners or max(map(_default_runners, devices)),
                weights=weights.name if weights else None,
                method=method.name,
                offered=offered,
                sequences=sequences,
            )
            for method in served
        )
        undo.pop_all()
        return LoadedPackage(tuple(replicas), methods, offered, options.warm_up)


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


def _batching(
    replicas: Sequence[ModelReplica], method: PackagedMethod, limits: BatchLimits, options: LoadOptions
) -> Batching:
    """Returns how requests of a method, or steps of different sequences, may run together."""
    if method.state and options.isolate:
        return Batching.impossible("the state is in a worker process, so each step runs alone")
    if not options.warm_up:
        return Batching.impossible("the warm-up is off, which would show that rows do not influence one another")
    most, bit_equal = _ANY_ROWS if limits.max_rows is None else limits.max_rows, True
    for replica in replicas:
        tried = replica.try_rows(method.name, most)
        if not tried.most:
            return Batching.impossible(tried.reason)
        most, bit_equal = tried.most, bit_equal and tried.bit_equal
    (dimension,) = (each for each in method.call.dimensions if each.name == tried.dimension)
    return Batching(dimension, most, bit_equal=bit_equal)
