"""An operator under check, and its calls, which the checks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from exportkit.operators.contract.operator_spec import OpSpec
from exportkit.operators.contract.sample import Sample, bound_arguments, tensors

Resize = Callable[[Sample, Mapping[int, int]], Sample | None]


@dataclass(frozen=True)
class Subject:
    """An operator under check.

    Attributes:
        overload: The dispatcher's operator.
        calls: Valid calls, in every dtype and on every device that shall be checked.
        reference: A function with the operator's parameters that computes the same with torch's operators. None: the
            kernel is compared only with itself.
        spec: The operator's promises, where it has any. None: each check assumes what the schema says.
        resize: Makes a call with other sizes, given which size becomes which; None where it cannot. Without the
            function, `resizing.with_sizes` does, and integer tensors are taken for indices unless a SPEC has them.
    """

    overload: OpOverload
    calls: tuple[Sample, ...]
    reference: Callable[..., Any] | None = None
    spec: OpSpec | None = None
    resize: Resize | None = None

    @classmethod
    def of_spec(cls, spec: OpSpec, devices: Iterable[torch.device] = (torch.device("cpu"),)) -> Subject:
        """The operator of a SPEC, at the SPEC's samples in each of its dtypes."""
        calls = tuple(sample for device in devices for dtype in spec.dtypes for sample in spec.samples(device, dtype))
        return cls(spec.overload, calls, spec.reference, spec)

    @property
    def name(self) -> str:
        """`namespace::name`, or `namespace::name.overload`."""
        schema = self.overload._schema
        return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name

    @property
    def function(self) -> Callable[..., Any]:
        """What users call: the SPEC's wrapper, or the operator."""
        return self.spec.wrapper if self.spec else self.overload

    @property
    def written(self) -> tuple[str, ...]:
        """The arguments that the schema says are written to."""
        arguments = self.overload._schema.arguments
        return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)

    @property
    def is_mutable(self) -> bool:
        """Whether the operator declares that it writes to an argument."""
        return self.overload._schema.is_mutable


class NotApplicable(Exception):
    """A check does not apply to a call, or to an operator. The message says why."""


_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "MemoryError", "Cannot allocate memory")


def is_out_of_memory(text: str) -> bool:
    """Whether an error says that there was not enough memory."""
    return any(words in text for words in _OUT_OF_MEMORY)


def first_line(error: BaseException) -> str:
    """Returns an error's class and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].rstrip('.')}" if text else type(error).__name__


class Trial:
    """One operator while it is checked. Answers to a call are computed once and shared.

    `count` is how often it was called; `others` are calls at sizes that the subject does not list, once they were made;
    `known` is what was found out about a call, by kind and the call's id, with the call, so that its id stays its own.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.count = 0
        self.others: list[Sample] | None = None
        self.known: dict[tuple[str, int], tuple[Sample | None, Any]] = {}

    def remembered(self, kind: str, call: Sample | None, find: Callable[[], Any]) -> Any:
        """Returns what `find` finds out about a call or the operator, or raises its error. It is asked once."""
        key = (kind, id(call))
        if key not in self.known:
            try:
                self.known[key] = (call, find())
            except Exception as error:
                error.__context__ = None  # with its traceback it would keep the call's tensors
                self.known[key] = (call, error.with_traceback(None))
        found = self.known[key][1]
        if isinstance(found, Exception):
            raise found
        return found

    def answer(self, call: Sample) -> list[Tensor]:
        """Returns what `produced` does, or raises NotApplicable: the operator refuses the call."""
        return self.remembered("answer", call, lambda: self._answered(call))

    def _answered(self, call: Sample) -> list[Tensor]:
        try:
            return self.fresh_answer(call)
        except Exception as error:
            raise NotApplicable(f"the operator refuses the call: {first_line(error)}") from None

    def outputs(self, call: Sample) -> list[Tensor]:
        """Returns all that the operator itself returns, of which a SPEC's wrapper may return a part. See `answer`."""
        if self.subject.function is self.subject.overload and not self.subject.is_mutable:
            return self.answer(call)
        self.answer(call)
        return self.remembered("outputs", call, lambda: tensors(self.run(call.copied(), self.subject.overload)))

    def fresh_answer(self, call: Sample, function: Callable[..., Any] | None = None) -> list[Tensor]:
        """Calls the operator, or another function, on copies of the arguments."""
        return self.used_up(call.copied(), function)

    def varied_answer(self, call: Sample, what: str, function: Callable[..., Any] | None = None) -> list[Tensor]:
        """Answers a call that a check made from a valid one, with other sizes or values, on copies of its arguments.

        NotApplicable: the operator refuses it and has no SPEC, so that nobody said that the call is valid. `what` says
        what it is, such as "a row of the call".
        """
        try:
            return self.fresh_answer(call, function)
        except Exception as error:
            if self.subject.spec is not None:
                raise
            raise NotApplicable(f"the operator refuses {what}: {first_line(error)}") from None

    def used_up(self, call: Sample, function: Callable[..., Any] | None = None) -> list[Tensor]:
        """Returns what the call produces, on the arguments themselves."""
        return self.produced(call, self.run(call, function))

    def produced(self, call: Sample, result: Any) -> list[Tensor]:
        """Returns the tensors of a result, and the arguments if the operator writes to one."""
        return tensors(result) + (call.tensors if self.subject.is_mutable else [])

    def run(self, call: Sample, function: Callable[..., Any] | None = None) -> Any:
        """Calls the operator, or another function, on the arguments themselves."""
        self.count += 1
        return (function or self.subject.function)(*call.args, **call.kwargs)

    def bound(self, call: Sample) -> dict[str, Any]:
        """Returns a call's arguments by name, with the schema's defaults."""
        return bound_arguments(self.subject.overload, call.args, call.kwargs)

    @contextlib.contextmanager
    def reproducible(self) -> Iterator[None]:
        """Starts from one random state, and leaves the caller's as it was."""
        devices = sorted({c.device for c in self.subject.calls if c.device.type == "cuda"}, key=str)
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            yield
