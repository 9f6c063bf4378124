"""Calls torch.export, and other sizes after an error about sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from exportkit.export.call_signature import BoundCall, is_tensor, plain_tuples
from exportkit.export.guards import GuardLog, declared, guard_log
from exportkit.export.lifted import STATE, lifted
from exportkit.export.quiet import quiet_torch
from exportkit.export.shapes import DynamicSizes, torch_dimensions, torch_shape
from exportkit.export.size_changes import Examples, proposals, untrue_names
from exportkit.export.state_buffers import StateBuffer
from exportkit.spec import ExportSpec


@dataclass(frozen=True)
class TracingTask:
    """What torch.export gets, except for the dynamic sizes.

    Attributes:
        spec: The module of one method, in eval mode and on its device.
        bound: Its example call.
        state: The model's state, which the program takes after the call's tensors.
    """

    spec: ExportSpec
    bound: BoundCall
    state: Sequence[StateBuffer] = ()

    @property
    def examples(self) -> Examples:
        """The sizes of the example inputs, by name."""
        return {name: tuple(tensor.shape) for name, tensor in zip(self.bound.names, self.bound.tensors)}


class RefusedByTorchError(Exception):
    """torch.export refused the model.

    Attributes:
        error: torch.export's error.
        sizes: The dynamic sizes of that call.
        log: What that call concluded about sizes.
    """

    def __init__(self, error: Exception, sizes: DynamicSizes, log: GuardLog) -> None:
        super().__init__(str(error))
        self.error, self.sizes, self.log = error, sizes, log


def export_with(task: TracingTask, sizes: DynamicSizes) -> torch.export.ExportedProgram:
    """Calls torch.export for these dynamic sizes.

    Raises:
        RefusedByTorchError: torch.export refused the model, or dropped a condition on a size with a factor
            (pytorch#141115).
    """
    program, log = call_export(torch.export.export, task, sizes)
    if names := untrue_names(sizes, log):
        raise RefusedByTorchError(ValueError(f"Constraints violated ({', '.join(names)})!"), sizes, log)
    return program


def call_export(
    export: Callable[..., torch.export.ExportedProgram], task: TracingTask, sizes: DynamicSizes
) -> tuple[torch.export.ExportedProgram, GuardLog]:
    """Calls torch.export.export, or a function with the same arguments. Returns the conditions on sizes as well.

    Raises:
        RefusedByTorchError: torch refused the model.
    """
    dims = torch_dimensions(sizes)
    bound, model = task.bound, task.spec.model
    state = tuple(buffer.at(sizes.example) for buffer in task.state)
    given = {**bound.kwargs, **({STATE: state} if state else {})}
    shape_of = iter(
        [torch_shape(sizes, dims, name) for name in bound.names]
        + [{0: dims[buffer.dimension]} if buffer.dimension in dims else None for buffer in task.state]
    )
    lengths = {f"{STATE}.{i}:0": b.dimension for i, b in enumerate(task.state) if b.dimension in dims}
    with (
        guard_log(declared(sizes, lengths)) as log,
        lifted(model, bound, task.state, task.spec.writes),
        plain_tuples(model, bound.args, given) as (args, kwargs),
    ):
        # A tree like the arguments, by parameter, with None for leaves that are not tensors.
        arguments: dict[str, Any] = {**dict(zip((p.name for p in bound.parameters), args)), **kwargs}
        dynamic = tree_map(lambda leaf: next(shape_of) if is_tensor(leaf) else None, arguments)
        try:
            with torch.no_grad(), quiet_torch(), _attention_of_no_machine():
                return export(model, args, kwargs, dynamic_shapes=dynamic, strict=False), log
        except Exception as error:
            # torch.export raises about thirty unrelated classes.
            raise RefusedByTorchError(error, sizes, log) from error


def _attention_of_no_machine() -> AbstractContextManager[None]:
    """Keeps this machine's choice of an attention kernel out of a trace.

    The graph holds scaled_dot_product_attention itself, and the compiler chooses the kernel. But tracing asks for a
    kernel too, and CUDA's in float32 wants a mask whose length is a multiple of 8, which becomes a guard on that size.
    The kernel made of matrix products wants nothing.
    """
    return sdpa_kernel(SDPBackend.MATH)


def sizes_that_trace(
    task: TracingTask, refused: RefusedByTorchError, tries: int
) -> tuple[DynamicSizes, torch.export.ExportedProgram] | None:
    """Searches sizes near the refused ones for which torch.export takes the model.

    Args:
        task: The model and its example call.
        refused: The first refusal.
        tries: How often torch.export may be called.

    Returns:
        The sizes and their program; None if there was nothing to try, or nothing worked.
    """
    waiting = proposals(str(refused), refused.sizes, task.examples, refused.log)
    for _ in range(tries):
        if not waiting:
            break
        sizes = waiting.pop(0)
        try:
            return sizes, export_with(task, sizes)
        except RefusedByTorchError as again:
            waiting = proposals(str(again), sizes, task.examples, again.log) + waiting
    return None
