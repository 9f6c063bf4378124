"""Who makes the calls: packages, the eager model and ONNX Runtime, each with a state of its own.

Before each timed call, the inputs and the state get their first values back. That is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from exportkit.bench.onnx_runtime import ONNX_RUNTIME, OnnxSteps
from exportkit.bench.steps import Steps
from exportkit.bench.timed_models import EagerWay, TimedPackage
from exportkit.bench.timing import Within
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.record.state_buffers import holding, place_of
from exportkit.package.case_files import named_results, named_tensors, result_keys, state_keys
from exportkit.package.manifest import Manifest
from exportkit.package.structure import builder, flatten
from exportkit.verify.replayer import has_state, state_sizes


@dataclass
class Contender:
    """One that makes the calls of a session.

    Attributes:
        name: The measurement's name.
        what: A description.
        state: The tensors of its state, by name: they stay the same tensors.
        methods: What to call, by method.
        within: A context that the calls need.
        assign: Puts the tensors of the state back into their places, where calls may replace them by others.
        load_ms: How long loading took.
        now: Returns the state as it is.
        settle: Puts what a call wrote into its inputs there, where the call does not do that. It is not timed.
    """

    name: str
    what: str
    state: Mapping[str, Tensor]
    methods: Mapping[str, Callable[..., Any]]
    within: Within = nullcontext
    assign: Callable[[], object] = lambda: None
    load_ms: float | None = None
    now: Callable[[], Mapping[str, Tensor]] = field(default=dict)
    settle: Callable[[], object] = lambda: None


def ours(package: TimedPackage, steps: Steps, stack: ExitStack) -> Contender:
    """A package, in a session of its own if its calls have state."""
    model, load_ms = package.model, package.load_ms
    if not has_state(model.manifest, steps.case):
        return Contender(package.name, package.what, {}, model.methods, load_ms=load_ms)
    session = stack.enter_context(model.session(**state_sizes(model.manifest, steps.case)))
    state = dict(session.state)
    return Contender(package.name, package.what, state, session.methods, load_ms=load_ms, now=lambda: state)


def eager(way: EagerWay, methods: EagerMethods, manifest: Manifest, steps: Steps) -> Contender:
    """The eager model. Where its calls have state, they write buffers of its own, without any help of ours."""
    used = {call.method for call in steps.case.calls}
    called = {name: way.of(spec.model) for name, spec in methods.specs.items() if name in used}
    if not has_state(manifest, steps.case):
        return Contender(way.name, way.what, {}, called, way.within)
    sizes = state_sizes(manifest, steps.case)
    state = {buffer.name: buffer.at(sizes) for buffer in methods.buffers}
    placed = {name: state[buffer.name] for buffer in methods.buffers for name in buffer.names}
    places = {name: place_of(methods.spec.model, name) for name in placed}

    @contextmanager
    def within() -> Iterator[None]:
        with holding(methods.spec.model, placed), way.within():
            yield

    def assign() -> None:
        for name, (module, key) in places.items():
            module._buffers[key] = placed[name]

    def now() -> dict[str, Tensor]:
        found = {name: module._buffers[key] for name, (module, key) in places.items()}
        return {name: tensor for name in state if (tensor := found[name]) is not None}

    return Contender(way.name, way.what, state, called, within, assign, now=now)


def onnx(model: OnnxSteps, beside: Contender) -> Contender:
    """ONNX Runtime, which is given the state and gives it back. It begins with the state that another contender has."""
    state = {name: tensor.clone() for name, tensor in beside.state.items()}

    def assign() -> None:
        model.state = dict(state)

    return Contender(
        name=ONNX_RUNTIME,
        what=model.what,
        state=state,
        methods=model.methods,
        assign=assign,
        load_ms=model.load_ms,
        now=lambda: model.state,
        settle=model.settle,
    )


class Calls:
    """The calls of a session by one contender."""

    def __init__(self, contender: Contender, steps: Steps, manifest: Manifest, device: torch.device) -> None:
        self._contender, self._manifest, self._steps = contender, manifest, steps
        self._calls: list[Callable[[], Any]] = []
        self._restored: list[
            tuple[Tensor, Tensor]
        ] = []  # each tensor that calls write, with a copy of its first values
        self._inputs: list[list[Tensor]] = []
        for number, recorded in enumerate(steps.case.calls[: steps.count]):
            call = manifest.method(recorded.method).call
            inputs = [steps.tensors[f"{number}.input.{i}"].to(device, copy=True) for i in range(len(call.inputs))]
            self._inputs.append(inputs)
            self._restored += [(t, t.clone()) for t, each in zip(inputs, call.inputs) if each.written is not None]
            values = {each: builder(each.value)(inputs) for each in call.parameters}
            args = [value for each, value in values.items() if each.kind == "positional"]
            kwargs = {each.name: value for each, value in values.items() if each.kind == "keyword"}
            self._calls.append(partial(contender.methods[recorded.method], *args, **kwargs))
        self._start = {name: tensor.clone() for name, tensor in contender.state.items()}

    @property
    def before(self) -> Callable[[], None] | None:
        """What each timed call needs before it; None if calls write nothing."""
        return self.restore if self._restored or self._contender.state else None

    def restore(self) -> None:
        """Gives the state and the written inputs the values that they had before the timed call."""
        self._contender.assign()
        for name, tensor in self._contender.state.items():
            tensor.copy_(self._start[name])
        for tensor, before in self._restored:
            tensor.copy_(before)

    def answers(self) -> tuple[dict[str, Tensor], dict[int, str]]:
        """Makes all calls. Returns their answers, named as in a case's file, and the structures of the results.

        It also notes the state before the timed call, which `restore` puts back from then on.
        """
        manifest, found, structures = self._manifest, dict[str, Tensor](), dict[int, str]()
        self.restore()
        before = self._start
        for number, recorded in enumerate(self._steps.case.calls[: self._steps.count]):
            if number == self._steps.timed:
                before = {name: tensor.clone() for name, tensor in self._contender.now().items()}
            call = manifest.method(recorded.method).call
            structure, outputs = flatten(self._calls[number](), lambda part: isinstance(part, Tensor))
            self._contender.settle()
            structures[number] = msgspec.json.encode(structure).decode()
            written = zip(call.inputs, self._inputs[number])
            results = {f"written.{each.name}": t for each, t in written if each.written is not None}
            found |= named_tensors(f"{number}.output", outputs) | named_results(result_keys(number, call), results)
        found |= named_results(state_keys(manifest.state), self._contender.now())
        self._start = before
        return found, structures

    def timed(self) -> Callable[[], object]:
        """Returns what is timed."""
        return self._calls[self._steps.timed] if self._steps.timed is not None else self._all

    def _all(self) -> object:
        answer: object = None
        for call in self._calls:
            answer = call()
        return answer
