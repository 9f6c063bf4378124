"""Calls that are known to be valid: those of a model, and those that a function of the user yields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from exportkit.errors import UsageError
from exportkit.export.models.placement import prepared
from exportkit.export.models.source_lines import users_code, where_now
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.torch_patches.dispatch import OperatorMode, watched_by
from exportkit.export.torch_patches.opaque import composite_calls, run_composite
from exportkit.export.trace.preflight import is_custom, qualified_name
from exportkit.operators.contract.sample import Sample
from exportkit.spec import ExportSpec

_OF_EACH = 8  # calls of an operator, of those with other shapes, dtypes or numbers


class _Recorder(OperatorMode):
    """Keeps the calls of custom operators, with copies of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Sample]] = {}
        self._seen: set[tuple[str, str]] = set()

    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._keep(func, args, kwargs)
        return func(*args, **kwargs)

    def composite(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keeps a call that a mode does not see."""
        self._keep(func, args, kwargs)
        return run_composite(func, args, kwargs)

    def _keep(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_custom(func):
            name, place = qualified_name(func), where_now()
            call = Sample(f"called at {place}" if place else "called by the model", args, kwargs).copied()
            calls, form = self.calls.setdefault(name, []), (name, _form(call))
            if form not in self._seen and len(calls) < _OF_EACH:
                self._seen.add(form)
                calls.append(call)


def calls_of_model(spec: ExportSpec, device: torch.device) -> dict[str, list[Sample]]:
    """Runs a model on its example inputs, and returns its calls of custom operators, by the operator's name.

    Raises:
        ExportError: The model raised an error.
    """
    doing = users_code("running the model on its example inputs")
    recorder = _Recorder()
    seen = composite_calls(device, recorder.composite)
    with prepared(spec, device, None) as placed, seen, watched_by(recorder), doing:
        eager = EagerMethods(placed)
        for name, each in eager.specs.items():
            eager.session().call(name, eager.bind(name, each.example_inputs, each.example_kwargs))
    return recorder.calls


def calls_of_function(text: str, function: Callable[[], Any]) -> list[Sample]:
    """Calls a function that yields (args, kwargs).

    Args:
        text: How the user named the function.
        function: The function.

    Raises:
        UsageError: It yields something else, or nothing.
        ExportError: It raised an error.
    """
    with users_code(f"calling {text}"):
        given = list(function())
    calls = []
    for number, each in enumerate(given):
        if not (
            isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], tuple) and isinstance(each[1], dict)
        ):
            raise UsageError(
                f"{text} yielded {type(each).__name__}, not a pair of a tuple and a dict",
                hint="Yield (args, kwargs), such as `yield (torch.randn(2, 3), 0.5), {}`.",
            )
        calls.append(Sample(f"call {number} of {text}", *each))
    if not calls:
        raise UsageError(f"{text} yields no calls", hint="Yield (args, kwargs), once for each call.")
    return calls


def _form(call: Sample) -> str:
    """Says which calls are alike: those with the same dtypes, shapes and numbers."""
    numbers = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: None, (call.args, dict(call.kwargs)))
    return f"{[(t.dtype, tuple(t.shape), t.stride()) for t in call.tensors]} {numbers}"
