"""Rebuilds the eager model of an artifact."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from exportkit.errors import UsageError
from exportkit.export.models.placement import parse_floating, prepared
from exportkit.export.models.program_model import dimension_of
from exportkit.export.models.resolve import resolve
from exportkit.package.manifest import Call, PackagedMethod, Source, StateTensor
from exportkit.reference_model import ReferenceModel
from exportkit.sizes import shape_at
from exportkit.spec import FORWARD, ExportSpec


@contextmanager
def rebuild_eager(
    eager: ReferenceModel,
    source: Source,
    methods: Sequence[PackagedMethod],
    state: Sequence[StateTensor],
    device: torch.device,
) -> Iterator[ExportSpec]:
    """Makes MODEL with the arguments, seed and dtype of an export, on a device. `EagerMethods` calls it.

    What the export declared to be state or written is declared in the spec, wherever it was declared then.

    Compare its `state_sha256` with the artifact's to know whether it is still the same model.

    Args:
        eager: MODEL, which `ReferenceModel.model_of` has allowed, with its weights and libraries.
        source: The artifact's source. The callable gets its arguments, which are numbers, text, booleans and null.
        methods: The artifact's methods.
        state: The artifact's state.
        device: A device that this machine has.

    Raises:
        ModelNotFoundError: MODEL cannot be imported here.
        UsageError: The arguments do not fit the model any more.
        ExportError: Importing or making the model raised an error.
    """
    arguments: dict[str, Any] = {
        "model_kwargs": source.model_kwargs,
        "weights": eager.weights,
        "op_libraries": eager.op_libraries,
        "seed": source.seed,
    }
    assert eager.model is not None
    try:
        resolved = resolve(eager.model, **arguments)
    except UsageError:
        # A bare module was exported with --input, so it needs inputs of the same form.
        resolved = resolve(eager.model, inputs=input_texts(methods[0].call), **arguments)
    declared = _declared(resolved.spec, methods, state)
    with prepared(declared, device, parse_floating(source.dtype)) as spec:
        yield spec


def _declared(spec: ExportSpec, methods: Sequence[PackagedMethod], state: Sequence[StateTensor]) -> ExportSpec:
    """Returns the spec with the state and the written inputs of an artifact."""
    patterns = {glob.escape(each.name): dimension_of(each) for each in state}
    writes = {m.name: tuple(t.name for t in m.call.inputs if t.written is not None) for m in methods}
    if not spec.methods:
        return replace(spec, state=patterns, writes=writes.get(FORWARD, ()))
    listed = {name: replace(method, writes=writes.get(name, ())) for name, method in spec.methods.items()}
    return replace(spec, state=patterns, methods=listed)


def input_texts(call: Call) -> list[str]:
    """Returns --input texts for the tensors of a call."""
    # Inputs of other sizes are drawn from these values, so dimensions should not be too small.
    sizes = {dimension.name: min(max(dimension.min, 8), dimension.max) for dimension in call.dimensions}
    return [f"{tensor.name}={tensor.dtype}{shape_at(tensor, sizes)}" for tensor in call.inputs]
