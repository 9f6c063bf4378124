"""Describes the state of traced methods for the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from exportkit.errors import UsageError
from exportkit.export.record.cases import check_packable
from exportkit.export.record.host_copies import initial_record
from exportkit.export.record.state_buffers import StateBuffer
from exportkit.export.record.tolerances import output_tolerances
from exportkit.export.trace.traced import TracedMethod
from exportkit.package.archive import Content
from exportkit.package.manifest import ANY_VALUE, OutputTolerance, Size, StateTensor


def describe_state(
    buffers: Sequence[StateBuffer], methods: Sequence[TracedMethod], *, cast: torch.dtype | None, values: bool
) -> tuple[tuple[StateTensor, ...], dict[str, Content]]:
    """Describes the state that methods use."""
    tensors: list[StateTensor] = []
    records: dict[str, Content] = {}
    tolerances = output_tolerances([(each.name, each.initial.dtype) for each in buffers], {}, cast=cast)
    for index, (buffer, tolerance) in enumerate(zip(buffers, tolerances)):
        users = [method for method in methods if any(use.index == index for use in method.state)]
        _check_written(buffer, index, methods)
        _check_dimension(buffer, users)
        check_packable(f"state {buffer.name}", buffer.initial.dtype)
        record, content = initial_record(buffer.initial)
        if record is not None:
            records[record] = content
        shape: list[int | Size] = list(buffer.initial.shape)
        if buffer.dimension is not None:
            shape[0] = Size(dimension=buffer.dimension)
        tensors.append(
            StateTensor(
                name=buffer.name,
                aliases=buffer.aliases,
                dtype=str(buffer.initial.dtype).removeprefix("torch."),
                shape=tuple(shape),
                initial=record,
                tolerance=tolerance if values else OutputTolerance(rtol=0.0, atol=ANY_VALUE),
            )
        )
    return tuple(tensors), records


def _check_written(buffer: StateBuffer, index: int, methods: Sequence[TracedMethod]) -> None:
    if not any(use.index == index and use.written for method in methods for use in method.state):
        names = ", ".join(method.name for method in methods)
        raise UsageError(
            f"{buffer.name} is declared to be state, and no method writes it ({names})",
            hint="Leave it out: use narrower patterns for --state or ExportSpec(state=...). What is only read is a "
            "weight.",
        )


def _check_dimension(buffer: StateBuffer, users: Sequence[TracedMethod]) -> None:
    if buffer.dimension is None:
        return
    ranges = {user.name: next(d for d in user.call.dimensions if d.name == buffer.dimension) for user in users}
    for name, other in ranges.items():
        if other != next(iter(ranges.values())):
            raise UsageError(
                f"`{buffer.dimension}`, the first axis of the state {buffer.name}, is {other.min} to {other.max} in "
                f"the method {name}, and not in {next(iter(ranges))}",
                hint="Give it one range.",
            )


def check_shapes(method: str, used: Mapping[int, Sequence[int | Size]], buffers: Sequence[StateBuffer]) -> None:
    """Checks that a traced method takes state of every size of its dimension."""
    for index, shape in used.items():
        dimension = buffers[index].dimension
        if dimension is not None and shape[0] != Size(dimension=dimension):
            raise UsageError(
                f"the method {method} takes the state {buffers[index].name} with a first axis of {shape[0]}, not of "
                f"any `{dimension}`",
                hint=f"Give an input of {method} that size, such as {{0: '{dimension}[1:64]'}} in dynamic_shapes, or "
                "leave out the dimension of the state.",
            )
