"""Calls torch.export, and other sizes after an error about sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from exportkit.errors import HostError
from exportkit.export.models.call_signature import BoundCall, describe_call, is_tensor, plain_tuples
from exportkit.export.models.program_model import STATE
from exportkit.export.models.source_lines import users_code
from exportkit.export.record.cases import resampled
from exportkit.export.record.state_buffers import StateBuffer
from exportkit.export.sizes.declared import declared
from exportkit.export.sizes.guards import GuardLog, guard_log
from exportkit.export.sizes.shapes import DynamicSizes, dynamic_sizes, torch_dimensions, torch_shape
from exportkit.export.sizes.size_changes import (
    Examples,
    proposals,
    sizes_as_texts,
    untrue_names,
    violated_names,
)
from exportkit.export.torch_patches.batch_rules import varying_batches
from exportkit.export.torch_patches.control_flow import ControlFlowError, traceable_control_flow, weights_apart
from exportkit.export.torch_patches.data_sizes import from_zero
from exportkit.export.torch_patches.distributions import unchecked_distributions
from exportkit.export.torch_patches.gradients import gradients_of, traced
from exportkit.export.torch_patches.operator_bodies import traced_bodies
from exportkit.export.torch_patches.quiet import quiet_torch
from exportkit.export.trace.describe_program import taken_tensors
from exportkit.export.trace.hop_subgraphs import correct_branches
from exportkit.export.trace.lifted import lifted
from exportkit.export.trace.recurrent_layers import whole_recurrent_layers
from exportkit.sizes import label_of
from exportkit.spec import ExportSpec

_MOST = 64_000_000  # numbers in the inputs of another example


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
    return export_tried(task, sizes)[0]


@dataclass(frozen=True)
class SizeTrial:
    """Where a program must be held against eager, because it was traced under a condition that fails there.

    Attributes:
        sizes: Sizes at which it fails.
        refused: What to explain if the program is wrong there.
        legal: Whether eager must take these sizes.
    """

    sizes: tuple[dict[str, int], ...]
    refused: RefusedByTorchError
    legal: bool


def export_tried(task: TracingTask, sizes: DynamicSizes) -> tuple[torch.export.ExportedProgram, tuple[SizeTrial, ...]]:
    """Calls torch.export for these dynamic sizes: once more if it refused them, and from another example if need be.

    Returns:
        The program, and where it must be tried: conditions fail there by which operators chose a layout, or Python's
        code branched on several sizes, which torch does not refuse.

    Raises:
        RefusedByTorchError: torch.export refused the model, or dropped a condition on a size with a factor
            (pytorch#141115).
    """
    trials: list[SizeTrial] = []
    try:
        program, log = _export_once(task, sizes)
    except RefusedByTorchError as refused:
        if not refused.log.entries or not violated_names(str(refused)):
            raise
        program, log = _export_forgiving(task, sizes)
        trials.append(SizeTrial(tuple(log.tried), refused, legal=True))
    for branch in log.branches():
        names = ", ".join(sorted(symbol.name for symbol in branch.free_symbols))
        refusal = RefusedByTorchError(ValueError(f"Constraints violated ({names})!"), sizes, log)
        trials.append(SizeTrial(tuple(log.declared.failing(branch)), refusal, legal=False))
    return program, tuple(trials)


def _export_forgiving(task: TracingTask, sizes: DynamicSizes) -> tuple[torch.export.ExportedProgram, GuardLog]:
    try:
        return _export_once(task, sizes, forgiving=True)
    except RefusedByTorchError as refused:
        if (other := _from_another_example(task, sizes, refused.log)) is None:
            raise
        try:
            return _export_once(*other, forgiving=True)
        except RefusedByTorchError as again:
            # From there it shows what else is untrue, not what an unlucky example made a constant.
            reason = again if violated_names(str(again)) else refused
            raise RefusedByTorchError(reason.error, sizes, reason.log) from reason.error


def _export_once(
    task: TracingTask, sizes: DynamicSizes, *, forgiving: bool = False
) -> tuple[torch.export.ExportedProgram, GuardLog]:
    program, log = call_export(torch.export.export, task, sizes, forgiving=forgiving)
    correct_branches(program)
    ties = log.ties()
    if names := [*ties, *(name for name in untrue_names(sizes, log) if name not in ties)]:
        fixes = "\nSuggested fixes:" * bool(ties) + "".join(f"\n  {name} = {size}" for name, size in ties.items())
        raise RefusedByTorchError(ValueError(f"Constraints violated ({', '.join(names)})!{fixes}"), sizes, log)
    log.drop_untrue(program)
    return program, log


def _from_another_example(
    task: TracingTask, sizes: DynamicSizes, log: GuardLog
) -> tuple[TracingTask, DynamicSizes] | None:
    """Returns a call of other sizes, where no size inside of the model is 0 or 1 that is so at the example's alone."""
    constant = log.constant_sizes()
    other = [
        sizes_there
        for sizes_there in (log.declared.failing(sympy.Or(*constant)) if constant else [])
        if sum(math.prod(shape) for shape in _shapes_at(task, sizes, sizes_there)) <= _MOST
    ]
    if not other:
        return None
    generator = torch.Generator().manual_seed(0)
    bound = task.bound
    if task.spec.draw_inputs is not None:
        with users_code(f"the spec's draw_inputs at {label_of(other[0])}"):
            bound = describe_call(task.spec.model, *task.spec.draw_inputs(other[0], generator))
    if bound.names != task.bound.names:
        return None
    shapes = _shapes_at(task, sizes, other[0])
    tensors = tuple(resampled(tensor, shape, generator) for tensor, shape in zip(bound.tensors, shapes))
    placed = tuple(tensor.to(like.device, like.dtype) for tensor, like in zip(tensors, task.bound.tensors))
    drawn = describe_call(task.spec.model, *bound.with_tensors(placed))
    return replace(task, bound=drawn), replace(sizes, example=other[0])


def _shapes_at(task: TracingTask, sizes: DynamicSizes, values: Mapping[str, int]) -> list[list[int]]:
    """Returns the shapes of the inputs for these values of the names."""
    return [
        [size.at(values) if (size := sizes.at(name, dim)) else given for dim, given in enumerate(example)]
        for name, example in task.examples.items()
    ]


def call_export(
    export: Callable[..., torch.export.ExportedProgram],
    task: TracingTask,
    sizes: DynamicSizes,
    *,
    forgiving: bool = False,
) -> tuple[torch.export.ExportedProgram, GuardLog]:
    """Calls torch.export.export, or a function with the same arguments. Returns the conditions on sizes as well.

    Args:
        export: The function.
        task: What it gets.
        sizes: The dynamic sizes.
        forgiving: Whether conditions by which operators choose a layout may fail.

    Raises:
        RefusedByTorchError: torch refused the model.
    """
    return traced(task.spec.model, lambda: _call_export(export, task, sizes, forgiving=forgiving))


def _call_export(
    export: Callable[..., torch.export.ExportedProgram], task: TracingTask, sizes: DynamicSizes, *, forgiving: bool
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
        guard_log(declared(sizes, lengths), forgiving=forgiving) as log,
        lifted(model, bound, task.state, task.spec.writes),
        plain_tuples(model, bound.args, given) as (args, kwargs),
    ):
        # A tree like the arguments, by parameter, with None for leaves that are not tensors.
        arguments: dict[str, Any] = {**dict(zip((p.name for p in bound.parameters), args)), **kwargs}
        dynamic = tree_map(lambda leaf: next(shape_of) if is_tensor(leaf) else None, arguments)
        try:
            with _traceable(model, log):
                try:
                    return export(model, args, kwargs, dynamic_shapes=dynamic, strict=False), log
                except ControlFlowError:
                    with weights_apart(model) as moved:
                        if not moved:
                            raise
                        return export(model, args, kwargs, dynamic_shapes=dynamic, strict=False), log
        except HostError:  # of whole_recurrent_layers
            raise
        except Exception as error:
            # torch.export raises about thirty unrelated classes.
            raise RefusedByTorchError(error, sizes, log) from error


@contextmanager
def _traceable(model: torch.nn.Module, log: GuardLog) -> Iterator[None]:
    """Changes what torch.export takes while the block runs."""
    with ExitStack() as changes:
        for change in (
            gradients_of(model),
            quiet_torch(),
            _attention_of_no_machine(),
            whole_recurrent_layers(log.unrolled),
            from_zero(),
            unchecked_distributions(),
            varying_batches(),
            traceable_control_flow(),
            traced_bodies(),
        ):
            changes.enter_context(change)
        yield


def _attention_of_no_machine() -> AbstractContextManager[None]:
    """Keeps this machine's choice of an attention kernel out of a trace.

    The graph holds scaled_dot_product_attention itself, and the compiler chooses the kernel. But tracing asks for a
    kernel too, and CUDA's in float32 wants a mask whose length is a multiple of 8, which becomes a guard on that size.
    The kernel made of matrix products wants nothing.
    """
    return sdpa_kernel(SDPBackend.MATH)


def sizes_that_trace(
    task: TracingTask, refused: RefusedByTorchError, tries: int, *, strict: bool = False
) -> tuple[DynamicSizes, torch.export.ExportedProgram] | None:
    """Searches sizes near the refused ones for which torch.export takes the model.

    Args:
        task: The model and its example call.
        refused: The first refusal.
        tries: How many sizes may be tried.
        strict: Takes only sizes for which no condition fails by which an operator chose a layout.

    Returns:
        The sizes and their program; None if there was nothing to try, or nothing worked.
    """
    waiting = proposals(str(refused), refused.sizes, task.examples, refused.log)
    asked = False
    for _ in range(tries):
        if not waiting:
            break
        sizes = waiting.pop(0)
        try:
            return sizes, _export_once(task, sizes)[0] if strict else export_with(task, sizes)
        except RefusedByTorchError as again:
            waiting = proposals(str(again), sizes, task.examples, again.log) + waiting
            if not asked:
                asked, waiting = True, [*_with_followers(task, refused), *waiting]
    return None


def _with_followers(task: TracingTask, refused: RefusedByTorchError) -> list[DynamicSizes]:
    """Returns the sizes with those of other inputs that follow a refused one, which a trace without names tells.

    Sizes that are equal in the example by chance are left alone.
    """
    named = refused.sizes.by_axis
    wrong = {axis for axis, size in named.items() if size.dimension in violated_names(str(refused))}
    alike = {task.examples[tensor][dim] for tensor, dim in wrong}
    axes = [(tensor, dim) for tensor, shape in task.examples.items() for dim in range(len(shape))]
    unnamed = [(t, dim) for t, dim in axes if (t, dim) not in named and task.examples[t][dim] in alike]
    try:
        program, _ = call_export(torch.export.export, task, DynamicSizes(free=[*named, *unnamed]))
    except RefusedByTorchError:
        return []
    values = dict(zip(task.bound.names, taken_tensors(program)))
    texts = sizes_as_texts(refused.sizes)
    for tensor, dim in unnamed:
        for leader in wrong:
            if _same(values, (tensor, dim), leader):
                texts.setdefault(tensor, {})[dim] = texts[leader[0]][leader[1]]
    return [dynamic_sizes(texts, task.examples)] if texts != sizes_as_texts(refused.sizes) else []


def _same(values: Mapping[str, torch.Tensor], one: tuple[str, int], other: tuple[str, int]) -> bool:
    sizes: list[int | torch.SymInt] = [values[tensor].shape[dim] for tensor, dim in (one, other)]
    expressions = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
    return len(expressions) == 2 and bool(expressions[0] == expressions[1])
