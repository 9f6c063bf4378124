"""Turns state into inputs, so that the graph of a method with state can be cut: a cut computes one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from exportkit.export.models.placement import on_device
from exportkit.export.models.program_model import STATE
from exportkit.export.record.cases import eager_mode
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.record.sequences import DrawnCall
from exportkit.package.manifest import (
    Call,
    Dimension,
    Manifest,
    PackagedMethod,
    Parameter,
    SequenceNode,
    Size,
    StateTensor,
    TensorInput,
    TensorNode,
)


def used_by(method: PackagedMethod, manifest: Manifest) -> list[StateTensor]:
    """Returns the state that a method's program takes, in its order."""
    return [manifest.state[use.index] for use in method.state]


def call_with_state(method: PackagedMethod, manifest: Manifest) -> Call:
    """Describes the call of a method's program, whose state is an input like others. What it writes is a result."""
    call, state = method.call, used_by(method, manifest)
    if not state:
        return call
    count = len(call.inputs)
    inputs = tuple(
        TensorInput(
            name=f"{STATE}.{position}",
            dtype=tensor.dtype,
            shape=tensor.shape,
            written=tensor.tolerance if use.written else None,
        )
        for position, (use, tensor) in enumerate(zip(method.state, state))
    )
    items = tuple(TensorNode(index=count + position) for position in range(len(inputs)))
    taken = Parameter(name=STATE, kind="keyword", value=SequenceNode(kind="tuple", items=items))
    known = {dimension.name for dimension in call.dimensions}
    sizes = {size.dimension for tensor in state for size in tensor.shape if isinstance(size, Size)}
    others = {each.name: each for other in manifest.methods for each in other.call.dimensions}
    more: list[Dimension] = [others[name] for name in sorted(sizes - known)]
    return msgspec.structs.replace(
        call,
        parameters=(*call.parameters, taken),
        inputs=(*call.inputs, *inputs),
        dimensions=(*call.dimensions, *more),
    )


def written_state(method: PackagedMethod) -> list[str]:
    """Returns the inputs of `call_with_state` that are state and are written."""
    return [f"{STATE}.{position}" for position, use in enumerate(method.state) if use.written]


def state_before(
    eager: EagerMethods, calls: Sequence[DrawnCall], sizes: Mapping[str, int], device: torch.device, *, tf32: bool
) -> dict[str, torch.Tensor]:
    """Returns eager's state after some calls, by name.

    Args:
        eager: The model, on its device.
        calls: The calls.
        sizes: Of the state's dimensions.
        device: The device.
        tf32: Whether eager may use TF32.
    """
    dimensions = {buffer.dimension for buffer in eager.buffers}
    session = eager.session({name: size for name, size in sizes.items() if name in dimensions})
    with eager_mode(tf32=tf32):
        for call in calls:
            session.call(call.method, on_device(call.bound, device))
    return {name: tensor.clone() for name, tensor in session.state.items()}
