"""Who makes the calls: packages, the eager model and ONNX Runtime, each with a state of its own.

Before each timed call, the inputs and the state get their first values back. That is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from exportkit.bench.steps import Steps
from exportkit.bench.timed_models import EagerWay, TimedPackage
from exportkit.bench.timing import Within
from exportkit.errors import UsageError
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.record.state_buffers import holding, place_of
from exportkit.onnx.files import described, model_paths, named_model, open_onnx
from exportkit.onnx.interface import Interface
from exportkit.onnx.onnx_session import Bits, OnnxSession, bits_type
from exportkit.package.case_files import named_results, state_keys
from exportkit.package.core import Demand
from exportkit.package.manifest import Manifest
from exportkit.package.structure import arguments, builder
from exportkit.runtime.loaded_cases import answers_of
from exportkit.sizes import has_state, state_sizes

ONNX_RUNTIME = "onnxruntime"


class OnnxSteps:
    """The ONNX models of a package's methods in one session: what comes out as state goes into the next call.

    `methods` has by method what to call with the arguments of its torch method; its results are those of that. `state`
    has the tensors that the next call begins with.
    """

    def __init__(self, path: Path, device: torch.device, demand: Demand, methods: Collection[str]) -> None:
        """Loads the models of some methods, whose sidecar is beside them, with as many threads as torch has.

        UsageError: it is not an ONNX model, the device is not the CPU, or a method does not exist. Other errors are
        those of `open_onnx` and OnnxSession.
        """
        model, start = _onnx_model(path, device), time.perf_counter()
        with open_onnx(model, demand=demand) as sidecar:
            self.manifest = sidecar.manifest
            paths = model_paths(sidecar)
            self._sessions = {}
            for name in methods:
                interface = Interface.of(self.manifest.method(name), self.manifest.state)
                file, onnx = paths.get(name, model), described(sidecar, name)
                self._sessions[name] = OnnxSession(file, onnx, interface, threads=torch.get_num_threads())
                self.what = f"ONNX Runtime {self._sessions[name].version}, opset {onnx.opset}"
        self.load_ms = (time.perf_counter() - start) * 1e3
        self.methods = {name: partial(self._call, name, _Method(self.manifest, name)) for name in methods}
        self.state: dict[str, Tensor] = {}
        self._written: list[tuple[Tensor, Tensor]] = []

    def settle(self) -> None:
        """Puts what the last call wrote into its inputs there, which a call does not do itself."""
        for given, new in self._written:
            given.copy_(new)

    def _call(self, name: str, method: _Method, *args: Any, **kwargs: Any) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        past = [self.state[each] for each in method.taken]
        outputs = [_tensor(output) for output in self._sessions[name].run([_bits(t) for t in (*inputs, *past)])]
        results, written = len(method.call.outputs), len(method.written)
        self.state.update(zip(method.changed, outputs[results + written :]))
        self._written = list(zip([inputs[place] for place in method.written], outputs[results:]))
        return method.build(outputs)


class _Method:
    """What a call of a method takes and gives beside its arguments and its result."""

    def __init__(self, manifest: Manifest, name: str) -> None:
        described = manifest.method(name)
        self.call = described.call
        self.taken = [manifest.state[use.index].name for use in described.state]
        self.changed = [manifest.state[use.index].name for use in described.state if use.written]
        self.written = [place for place, each in enumerate(self.call.inputs) if each.written is not None]
        self.build: Callable[[Sequence[Tensor]], Any] = builder(self.call.result)


def _onnx_model(path: Path, device: torch.device) -> Path:
    if device.type != "cpu":
        raise UsageError("--onnx times ONNX Runtime's CPUExecutionProvider", hint="Give --device cpu.")
    if (model := named_model(path)) is None:
        raise UsageError(f"{path} is not an ONNX model", hint="`exportkit export --format onnx` writes one.")
    return model


def _bits(tensor: Tensor) -> Bits:
    """Returns a tensor's memory."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Bits(dtype, tensor.detach().contiguous().view(getattr(torch, bits_type(dtype))).numpy())


def _tensor(output: Bits) -> Tensor:
    return torch.from_numpy(output.array).view(getattr(torch, output.dtype))


@dataclass
class Contender:
    """One that makes the calls of a session, by method, within a context.

    The tensors of its state stay the same: `assign` puts them back into their places, where calls may replace them by
    others, and `now` returns the state as it is. `settle` puts what a call wrote into its inputs there, where the call
    does not do that. It is not timed.
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
        for name, (held, key) in places.items():
            held[key] = placed[name]

    def now() -> dict[str, Tensor]:
        return {name: held[key].detach() for name in state for held, key in [places[name]]}

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
        # Each tensor that calls write, with a copy of its first values.
        self._restored: list[tuple[Tensor, Tensor]] = []
        self._inputs: list[list[Tensor]] = []
        for number, recorded in enumerate(steps.case.calls[: steps.count]):
            call = manifest.method(recorded.method).call
            inputs = [steps.tensors[f"{number}.input.{i}"].to(device, copy=True) for i in range(len(call.inputs))]
            self._inputs.append(inputs)
            self._restored += [(t, t.clone()) for t, each in zip(inputs, call.inputs) if each.written is not None]
            args, kwargs = arguments(call, inputs)
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
            result = self._calls[number]()
            self._contender.settle()
            answers, structures[number] = answers_of(number, call, result, self._inputs[number])
            found |= answers
        found |= named_results(state_keys(manifest.state), self._contender.now())
        self._start = before
        return found, structures

    def timed(self) -> Callable[[], object]:
        """Returns what is timed."""
        return self._calls[self._steps.timed]
