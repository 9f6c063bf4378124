"""Calls torch.export, with what it lacks in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from exportkit.errors import HostError
from exportkit.export.models.call_signature import BoundCall, is_tensor, plain_tuples
from exportkit.export.models.program_model import STATE
from exportkit.export.record.state_buffers import StateBuffer
from exportkit.export.sizes.declared import declared
from exportkit.export.sizes.guards import GuardLog, guard_log
from exportkit.export.sizes.shapes import DynamicSizes, torch_dimensions, torch_shape
from exportkit.export.sizes.size_changes import Examples
from exportkit.export.torch_patches.control_flow import traceable_control_flow
from exportkit.export.torch_patches.gradients import gradients_of, traced
from exportkit.export.torch_patches.known_values import known_values
from exportkit.export.torch_patches.operator_bodies import traced_bodies
from exportkit.export.torch_patches.patched import patched
from exportkit.export.torch_patches.quiet import quiet_torch
from exportkit.export.torch_patches.tensors_of_sizes import from_zero, sizes_kept
from exportkit.export.trace.lifted import lifted
from exportkit.export.trace.recurrent_layers import whole_recurrent_layers
from exportkit.spec import ExportSpec


@dataclass(frozen=True)
class TracingTask:
    """What torch.export gets, except for the dynamic sizes.

    Attributes:
        spec: The module of one method, in eval mode and on its device.
        bound: Its example call.
        state: The model's state, which the program takes after the call's tensors.
        repeats: Whether the model answers the same inputs alike.
    """

    spec: ExportSpec
    bound: BoundCall
    state: Sequence[StateBuffer] = ()
    repeats: bool = True

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
        tried: What programs answered at sizes that were tried.
        names: The names of the sizes that were refused; none if sizes are not the reason.
    """

    def __init__(self, error: Exception, sizes: DynamicSizes, log: GuardLog, tried: tuple[str, ...] = ()) -> None:
        super().__init__(str(error))
        self.error, self.sizes, self.log, self.tried = error, sizes, log, tried
        violated = re.findall(r"(?:Constraints violated|unexpectedly required) \(([^)]*)\)", str(error))
        self.names = [name for each in violated for name in re.findall(r"[A-Za-z_]\w*", each)]


def call_export(
    export: Callable[..., torch.export.ExportedProgram], task: TracingTask, sizes: DynamicSizes
) -> tuple[torch.export.ExportedProgram, GuardLog]:
    """Calls torch.export.export, or a function with the same arguments. Returns the conditions on sizes as well.

    Raises:
        RefusedByTorchError: torch refused the model.
    """
    return traced(task.spec.model, lambda: _called(export, task, sizes))


def _called(
    export: Callable[..., Any], task: TracingTask, sizes: DynamicSizes
) -> tuple[torch.export.ExportedProgram, GuardLog]:
    dims = torch_dimensions(sizes, (buffer.dimension for buffer in task.state))
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
            with _traceable(model):
                return export(model, args, kwargs, dynamic_shapes=dynamic, strict=False), log
        except HostError:  # of whole_recurrent_layers
            raise
        except Exception as error:
            # torch.export raises about thirty unrelated classes.
            raise RefusedByTorchError(error, sizes, log) from error


@contextmanager
def _traceable(model: torch.nn.Module) -> Iterator[None]:
    """Changes what torch.export takes while the block runs."""
    with (
        gradients_of(model),
        quiet_torch(),
        # Keeps this machine's choice of an attention kernel out of a trace: the graph has the operator itself, and
        # the compiler chooses. But tracing asks for a kernel, too, and CUDA's in float32 wants a mask whose length
        # is a multiple of 8, which becomes a guard on that size. The kernel made of matrix products wants nothing.
        sdpa_kernel(SDPBackend.MATH),
        whole_recurrent_layers(),
        from_zero(),
        patched("Distribution._validate_args", lambda _: False),  # unless a model asks for it, as in torch.compile
        traceable_control_flow(),
        traced_bodies(),
        known_values(model),
        sizes_kept(model),
    ):
        yield
