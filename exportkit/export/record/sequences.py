"""Draws the calls of a session: for cases, and for comparing a package with eager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.errors import UsageError
from exportkit.export.models.call_signature import BoundCall
from exportkit.export.models.source_lines import users_code
from exportkit.export.record.cases import as_described, check_drawn, draw_inputs
from exportkit.export.record.eager_methods import DescribedModel, EagerMethods
from exportkit.package.manifest import Call, ConstantNode, Dimension, PackagedMethod
from exportkit.sizes import label_of, sizes_of

REPEATS = 4
"""How often the last method with state is called by default: its last calls read what its first ones wrote."""


@dataclass(frozen=True)
class DrawnCall:
    """A call to make: the method, the call with tensors on the CPU, and its sizes by dimension."""

    method: str
    bound: BoundCall
    sizes: Mapping[str, int]


def with_state(methods: Sequence[PackagedMethod]) -> list[PackagedMethod]:
    """Returns the methods that use state."""
    return [method for method in methods if method.state]


def session_call(methods: Sequence[PackagedMethod]) -> Call:
    """Returns a call with the inputs and the dimensions of a whole session, for `plan_sizes`.

    A dimension has the range that all methods with state allow which have it.
    """
    calls = [method.call for method in _default_order(methods)]
    ranges: dict[str, Dimension] = {}
    for call in calls:
        for each in call.dimensions:
            known = ranges.get(each.name, each)
            low, high = max(known.min, each.min), min(known.max, each.max)
            ranges[each.name] = Dimension(name=each.name, min=low, max=high, tried=known.tried or each.tried)
    inputs = tuple(tensor for call in calls for tensor in call.inputs)
    return Call(
        parameters=(), inputs=inputs, result=ConstantNode(value=None), outputs=(), dimensions=tuple(ranges.values())
    )


def draw_calls(model: DescribedModel, method: PackagedMethod, sizes: Mapping[str, int], seed: int) -> list[DrawnCall]:
    """Draws a call of a method, or a session if the method has state."""
    return draw_session(model, sizes, seed) if method.state else [draw_call(model.eager, method, sizes, seed)]


def draw_session(model: DescribedModel, sizes: Mapping[str, int], seed: int) -> list[DrawnCall]:
    """Draws the calls of one session, on the CPU: those of the spec's `draw_sequence`, or the default ones.

    Raises:
        UsageError: `draw_sequence` or `draw_inputs` returned calls that the methods do not take.
        ExportError: One of them raised.
    """
    if model.eager.spec.draw_sequence is not None:
        return _drawn_by_user(model, sizes, seed)
    drawn = []
    for number, method in enumerate(_default_order(model.methods)):
        own = {each.name: sizes[each.name] for each in method.call.dimensions}
        # Another seed for each: the same inputs again would hide a method that ignores them.
        drawn.append(draw_call(model.eager, method, own, seed + 1000 * number))
    return drawn


def draw_call(eager: EagerMethods, method: PackagedMethod, sizes: Mapping[str, int], seed: int) -> DrawnCall:
    """Draws one call of a method, on the CPU.

    Raises:
        UsageError: `draw_inputs` returned a call that the method does not take.
        ExportError: It raised.
    """
    args, kwargs = draw_inputs(eager.specs[method.name], method.call, sizes, seed)
    return DrawnCall(method.name, eager.bind(method.name, args, kwargs), sizes)


def _default_order(methods: Sequence[PackagedMethod]) -> list[PackagedMethod]:
    stateful = with_state(methods)
    return [*stateful, *stateful[-1:] * (REPEATS - 1)]


def _drawn_by_user(model: DescribedModel, sizes: Mapping[str, int], seed: int) -> list[DrawnCall]:
    eager = model.eager
    assert eager.spec.draw_sequence is not None
    what = f"the spec's draw_sequence at {label_of(sizes)}"
    with users_code(what):
        answer: Any = eager.spec.draw_sequence(dict(sizes), torch.Generator().manual_seed(seed))
    by_name = {method.name: method.call for method in with_state(model.methods)}
    held = {each.name for call in by_name.values() for each in call.dimensions}
    drawn = []
    for number, each in enumerate(answer if isinstance(answer, (list, tuple)) else ()):
        name, args, kwargs = each if isinstance(each, (list, tuple)) and len(each) == 3 else (None, None, None)
        if name not in by_name or not isinstance(args, tuple) or not isinstance(kwargs, dict):
            hint = f"{_SEQUENCE} The methods with state are {', '.join(by_name)}."
            raise UsageError(f"{what} returned {each!r:.80} as call {number}", hint=hint)
        bound, call = eager.bind(name, args, kwargs), by_name[name]
        own = sizes_of(call.inputs, [tensor.shape for tensor in bound.tensors])
        check_drawn(bound, call, own, f"{what}, call {number} ({name}),")
        placed = bound.with_tensors(as_described(bound.tensors, call))
        drawn.append(DrawnCall(name, eager.bind(name, *placed), own))
    if not drawn:
        raise UsageError(f"{what} returned no calls, but a {type(answer).__name__}", hint=_SEQUENCE)
    _check_state_sizes(eager, drawn, held, what)
    return drawn


def _check_state_sizes(eager: EagerMethods, drawn: Sequence[DrawnCall], held: set[str], what: str) -> None:
    for dimension in sorted({each.dimension for each in eager.buffers if each.dimension} & held):
        found = {call.sizes[dimension] for call in drawn if dimension in call.sizes}
        if not found:
            raise UsageError(f"{what} returned no call with `{dimension}`, which the state has")
        if len(found) > 1:
            raise UsageError(
                f"{what} returned calls whose `{dimension}` is {' and '.join(map(str, sorted(found)))}: it is the "
                "state's, so that a session has one"
            )


_SEQUENCE = 'It must return a list of calls such as [("prefill", (ids,), {}), ("decode", (token,), {})].'
