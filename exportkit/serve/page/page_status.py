"""What the page shows, as JSON: every model, what it takes and gives, and what it has counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import exportkit
from exportkit.package.manifest import Size
from exportkit.serve.engine.repository import Repository
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.engine.served_sequences import ServedSequences
from exportkit.serve.engine.statistics import REQUEST_SECONDS, Statistics
from exportkit.serve.page.page_parts import part_of
from exportkit.serve.serve_options import ServeOptions


def page_status(repository: Repository, options: ServeOptions) -> dict[str, Any]:
    """Returns the state of the server and of every model. Durations are in seconds, sizes in bytes.

    A size of a shape is a number, a multiple of a dimension (`dimension`, `scale`, `offset`), or null where the
    manifest does not say. The difference of two `seconds` counts the answers between them.
    """
    models = repository.models()
    served = {(model.name, model.version) for model in models}
    return {
        "server": {"version": exportkit.__version__, "ready": repository.ready, "draining": repository.draining},
        "bounds": REQUEST_SECONDS,
        "models": [_model(model, options) for model in models],
        "others": [
            {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
            for entry in repository.index()
            if (entry.name, entry.version) not in served
        ],
    }


def _model(model: ServedModel, options: ServeOptions) -> dict[str, Any]:
    call, metadata = model.call, model.metadata()
    return {
        "name": model.name,
        "version": model.version,
        "ready": model.ready,
        "failure": model.failure,
        "platform": metadata["platform"],
        "devices": list(model.devices),
        "batching": metadata["batching"],
        "dimensions": [{"name": each.name, "min": each.min, "max": each.max} for each in call.dimensions],
        "inputs": _tensors(call.inputs, metadata["inputs"]),
        "outputs": _tensors(call.outputs, metadata["outputs"]),
        "part": part_of(call),
        "limits": {
            "body": model.max_body,
            "queued_rows": options.batch.max_queued_rows,
            "queued_bytes": options.batch.max_queued_bytes,
            "delay": options.batch.max_delay,
        },
        "counters": _counters(model.counted),
        "sequences": None if model.sequences is None else _sequences(model.sequences),
    }


def _sequences(sequences: ServedSequences) -> dict[str, Any]:
    limits = sequences.limits
    return {
        "package": sequences.name,
        "count": sequences.count,
        "most": limits.most,
        "bytes": sequences.state_bytes,
        "most_bytes": limits.most_bytes,
        "oldest": sequences.oldest,
        "idle_seconds": limits.idle_seconds,
        "ended": dict(sorted(sequences.ended.items())),
    }


def _tensors(tensors: Sequence[Any], described: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    datatypes = {each["name"]: each["datatype"] for each in described}
    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "datatype": datatypes.get(tensor.name),
            "shape": [_size(size) for size in tensor.shape],
        }
        for tensor in tensors
    ]


def _size(size: int | Size | None) -> int | dict[str, Any] | None:
    if isinstance(size, Size):
        return {"dimension": size.dimension, "scale": size.scale, "offset": size.offset}
    return size


def _counters(counted: Statistics) -> dict[str, Any]:
    return {
        "requests": counted.success.count,
        "failures": {reason: spent.count for reason, spent in sorted(counted.failures.items())},
        "rows": counted.rows,
        "executions": counted.executions,
        "mean_batch": counted.rows / counted.executions if counted.executions else None,
        "seconds": list(counted.request_seconds),
        "pending": counted.pending,
        "queued_rows": counted.queued_rows,
        "queued_bytes": counted.queued_bytes,
        "runners": counted.runners,
        "busy_runners": counted.busy_runners,
        "last_inference": counted.last_inference,
        "load_seconds": counted.load_seconds,
    }
