"""Searches sizes for which a model can be traced, where it cannot for all that were declared."""

from __future__ import annotations

import torch

from exportkit.export.sizes.shapes import DynamicSizes, dynamic_sizes, expression_of
from exportkit.export.sizes.size_changes import SizeChange, changes_between, proposals, sizes_as_texts
from exportkit.export.trace.describe_program import taken_tensors
from exportkit.export.trace.judged_sizes import export_judged
from exportkit.export.trace.torch_export import RefusedByTorchError, TracingTask, call_export


def sizes_that_trace(task: TracingTask, refused: RefusedByTorchError, tries: int) -> DynamicSizes | None:
    """Searches sizes near the refused ones for which the model can be traced.

    None if there was nothing to try, or nothing worked.
    """
    waiting = [*_with_followers(task, refused), *proposals(refused.sizes, task.examples, refused.log.refuted())]
    for _ in range(tries):
        if not waiting:
            break
        sizes = waiting.pop(0)
        try:
            export_judged(task, sizes, traces=1)
            return sizes
        except RefusedByTorchError as again:
            waiting = proposals(sizes, task.examples, again.log.refuted()) + waiting
    return None


def changes_that_trace(task: TracingTask, refused: RefusedByTorchError, tries: int) -> tuple[SizeChange, ...]:
    """Returns the changes of sizes with which the model can be traced; none if there are none."""
    found = sizes_that_trace(task, refused, tries)
    return changes_between(refused.sizes, found, task.examples) if found else ()


def _with_followers(task: TracingTask, refused: RefusedByTorchError) -> list[DynamicSizes]:
    """Returns the sizes with those of other inputs that follow a refused one, which a trace without names tells.

    Sizes that are equal in the example by chance are left alone.
    """
    named = refused.sizes.by_axis
    wrong = {axis for axis, size in named.items() if size.dimension in refused.names}
    alike = {task.examples[tensor][dim] for tensor, dim in wrong}
    axes = [(tensor, dim) for tensor, shape in task.examples.items() for dim in range(len(shape))]
    unnamed = [(t, dim) for t, dim in axes if (t, dim) not in named and task.examples[t][dim] in alike]
    if not unnamed:
        return []
    try:
        program, _ = call_export(torch.export.export, task, DynamicSizes(free=[*named, *unnamed]))
    except RefusedByTorchError:
        return []
    values = dict(zip(task.bound.names, taken_tensors(program)))
    texts = sizes_as_texts(refused.sizes)
    for tensor, dim in unnamed:
        size = expression_of(values[tensor].shape[dim])
        for leader, axis in wrong:
            if not size.is_Integer and size == expression_of(values[leader].shape[axis]):
                texts.setdefault(tensor, {})[dim] = texts[leader][axis]
    return [dynamic_sizes(texts, task.examples)] if texts != sizes_as_texts(refused.sizes) else []
