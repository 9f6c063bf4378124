"""Calls of an operator under check, which the checks share."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from exportkit.operators.contract.operator_spec import Sample
from exportkit.operators.contract.subject import Subject


class NotApplicable(Exception):
    """A check does not apply to a call, or to an operator. The message says why."""


def tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in a value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def arguments(call: Sample) -> list[Tensor]:
    """Returns a call's tensors, in the order of its arguments."""
    return tensors((call.args, dict(call.kwargs)))


def with_tensors(call: Sample, change: Callable[[Tensor], Any]) -> Sample:
    """Returns the call with every tensor changed."""
    args, kwargs = pytree.tree_map_only(Tensor, change, (call.args, dict(call.kwargs)))
    return Sample(call.label, args, kwargs)


def with_tensor(call: Sample, number: int, tensor: Tensor) -> Sample:
    """Returns the call with another tensor in place of its tensor `number`."""
    counter = itertools.count()
    return with_tensors(call, lambda t: tensor if next(counter) == number else t)


def copied(call: Sample) -> Sample:
    """Returns the call on copies, so that an operator that writes to an argument cannot change the next call."""
    return with_tensors(call, lambda t: t.detach().clone(memory_format=torch.preserve_format))


def elements(call: Sample) -> int:
    """Returns how many elements a call's tensors have."""
    return sum(t.numel() for t in arguments(call))


def floating_dtype(call: Sample) -> torch.dtype | None:
    """Returns the dtype of a call's first floating tensor."""
    return next((t.dtype for t in arguments(call) if t.is_floating_point()), None)


def device_of(call: Sample) -> torch.device:
    """Returns the device of a call's first tensor, or the CPU."""
    return next((t.device for t in arguments(call)), torch.device("cpu"))


def first_line(error: BaseException) -> str:
    """Returns an error's class and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].rstrip('.')}" if text else type(error).__name__


class Trial:
    """One operator while it is checked. Answers to a call are computed once and shared.

    Attributes:
        subject: The operator and its calls.
        count: How many times it was called.
        others: Calls at sizes that the subject does not list, once they were made.
        known: What was found out about a call, by kind and the call's id, with the call, so that its id stays its own.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.count = 0
        self.others: list[Sample] | None = None
        self.known: dict[tuple[str, int], tuple[Sample, Any]] = {}

    def answer(self, call: Sample) -> list[Tensor]:
        """Returns what the call produces: its outputs, and its arguments if the operator writes to one.

        Raises:
            NotApplicable: The operator refuses the call.
        """
        key = ("answer", id(call))
        if key not in self.known:
            try:
                result: list[Tensor] | Exception = self.fresh_answer(call)
            except Exception as error:
                result = NotApplicable(f"the operator refuses the call: {first_line(error)}")
            self.known[key] = (call, result)
        answer = self.known[key][1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def outputs(self, call: Sample) -> list[Tensor]:
        """Returns all that the operator itself returns, of which a SPEC's wrapper may return a part.

        Raises:
            NotApplicable: The operator refuses the call.
        """
        if self.subject.function is self.subject.overload and not self.subject.is_mutable:
            return self.answer(call)
        self.answer(call)
        key = ("outputs", id(call))
        if key not in self.known:
            self.known[key] = (call, tensors(self.run(copied(call), self.subject.overload)))
        return self.known[key][1]

    def fresh_answer(self, call: Sample, function: Callable[..., Any] | None = None) -> list[Tensor]:
        """Calls the operator, or another function, on copies of the arguments."""
        return self.used_up(copied(call), function)

    def used_up(self, call: Sample, function: Callable[..., Any] | None = None) -> list[Tensor]:
        """Returns what the call produces, on the arguments themselves."""
        results = tensors(self.run(call, function))
        return results + arguments(call) if self.subject.is_mutable else results

    def run(self, call: Sample, function: Callable[..., Any] | None = None) -> Any:
        """Calls the operator, or another function, on the arguments themselves."""
        self.count += 1
        return (function or self.subject.function)(*call.args, **call.kwargs)

    def bound(self, call: Sample) -> dict[str, Any]:
        """Returns a call's arguments by name, with the schema's defaults."""
        schema = self.subject.overload._schema.arguments
        given = dict(zip([a.name for a in schema], call.args)) | dict(call.kwargs)
        return {a.name: given.get(a.name, a.default_value) for a in schema}

    @contextlib.contextmanager
    def reproducible(self) -> Iterator[None]:
        """Starts from one random state, and leaves the caller's as it was."""
        devices = sorted({device_of(c) for c in self.subject.calls if device_of(c).type == "cuda"}, key=str)
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            yield
