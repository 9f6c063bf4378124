"""What the page shows, as JSON: every model, what it takes and gives, and what it has counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

import exportkit
from exportkit.package.manifest import Size, TensorInput, TensorOutput
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.page.page_parts import part_of
from exportkit.serve.protocol.datatypes import datatype_of


def page_status(repository: Repository) -> dict[str, Any]:
    """Returns the state of the server and of every model.

    What may change while a model is served is in its `now`. Durations are seconds of all answered requests together.
    """
    return {
        "server": {"version": exportkit.__version__, "ready": repository.ready, "draining": repository.draining},
        "models": [_model(model) for model in repository.models()],
    }


def _model(model: ServedModel) -> dict[str, Any]:
    call, metadata, counted = model.call, model.metadata(), model.counted
    return {
        "name": model.name,
        "version": model.version,
        "devices": list(model.devices),
        "batching": metadata["batching"],
        "dimensions": msgspec.to_builtins(call.dimensions),
        "inputs": _tensors(call.inputs),
        "outputs": _tensors(call.outputs),
        "part": part_of(call),
        "sequences": metadata.get("sequences"),
        "now": {
            "ready": model.ready,
            "failure": model.failure,
            "requests": counted.success.count,
            "seconds": counted.success.seconds,
            "queue_seconds": counted.stages.queue.seconds,
            "failures": {reason: spent.count for reason, spent in sorted(counted.failures.items())},
            "rows": counted.rows,
            "executions": counted.executions,
            "queued_rows": counted.queued_rows,
        },
    }


def _tensors(tensors: Sequence[TensorInput | TensorOutput]) -> list[dict[str, Any]]:
    """Returns tensors with their sizes: numbers, multiples of a dimension, or null where the manifest does not say."""
    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "datatype": datatype_of(tensor.dtype),
            "shape": [msgspec.structs.asdict(size) if isinstance(size, Size) else size for size in tensor.shape],
        }
        for tensor in tensors
    ]
