"""Times calls that have state or write into inputs: one step of a session, or the whole sequence of calls.

Before each timed call, what it reads and writes is put back to what it was before, which is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from exportkit.bench.contestants import (
    COMPILERS,
    EagerWay,
    PackageOptions,
    TimedPackage,
    alternatives,
    check_interface,
    described_of,
    dtype_of,
    eager_ways,
)
from exportkit.bench.onnx_runtime import ONNX_RUNTIME, OnnxSteps
from exportkit.bench.package_sizes import parse_sizes
from exportkit.bench.references import NoOperators, OperatorCalledError, WithReferences
from exportkit.bench.results import Measurement, Row
from exportkit.bench.timing import Alternative, Within, measure
from exportkit.errors import DigestMismatchError, UsageError, WrongResultError
from exportkit.export.models.placement import on_device
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.record.record import record_case
from exportkit.export.record.sequences import DrawnCall, draw_call, draw_session, session_call
from exportkit.export.record.state_buffers import holding, place_of
from exportkit.package.archive import PackageReader
from exportkit.package.case_files import edge_case_in, named_results, named_tensors, result_keys, state_keys
from exportkit.package.manifest import Case, Manifest, PackagedMethod
from exportkit.package.structure import builder, flatten
from exportkit.package.trust import Trust
from exportkit.progress import Progress
from exportkit.runtime.model import Model
from exportkit.sizes import case_label, case_sizes, label_of
from exportkit.verify.judging import Judge
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Match
from exportkit.verify.replayer import ReplayTask, state_sizes


def session_rows(
    path: Path,
    loaded: Sequence[TimedPackage],
    method: PackagedMethod | None,
    eager: EagerMethods | None,
    note: str | None,
    device: torch.device,
    options: PackageOptions,
    progress: Progress,
) -> Iterator[Row]:
    """Times sequences of calls, or the last call of a method in each.

    Args:
        path: The first package.
        loaded: The packages.
        method: The method to time; None for whole sequences.
        eager: The eager model, or None.
        note: Why there is none.
        device: A device of this machine.
        options: The alternatives and the sizes.
        progress: Called with a description of each step.

    Raises:
        UsageError: No recorded case has such calls, --size cannot be used, or --onnx is a model of another kind.
        WrongResultError: A package's results differ from eager's.
    """
    manifest = loaded[0].model.manifest
    scripts = _drawn(manifest, method, eager, device, options) if options.sizes else _recorded(path, manifest, method)
    for steps in scripts:
        progress(f"{path.name}, {steps.label}")
        yield _row(path, steps, loaded, eager, note, device, options)


@dataclass(frozen=True)
class _Steps:
    """Calls in one session, and which of them are timed.

    Attributes:
        case: The calls.
        tensors: What eager was given and answered, as the file of a recorded case has it.
        timed: The number of the call that is timed, the last one that is made; None for all.
        fresh: Whether eager was asked now, and not at export.
    """

    case: Case
    tensors: Mapping[str, Tensor]
    timed: int | None
    fresh: bool = False

    @property
    def count(self) -> int:
        """The number of calls that are made."""
        return len(self.case.calls) if self.timed is None else self.timed + 1

    @property
    def label(self) -> str:
        """What is timed, in words."""
        return case_label(self.case) if self.timed is None else f"call {self.timed} of {case_label(self.case)}"

    def row(self, manifest: Manifest, measurements: tuple[Measurement, ...]) -> Row:
        """Returns the row of these calls."""
        number = self.timed or 0
        call = self.case.calls[number]
        words, _, _ = case_label(self.case).partition(";")
        several = len(manifest.methods) > 1
        subject = f"{manifest.name}{f' {call.method}' if several else ''}"
        return Row(
            subject=subject if self.timed is not None else f"{manifest.name}: {words}",
            size=label_of(case_sizes(self.case) if self.timed is None else call.sizes),
            dtype=dtype_of(manifest.method(call.method).call),
            direction="forward",
            moved_bytes=None,
            limit=None,
            measurements=measurements,
        )


def _recorded(path: Path, manifest: Manifest, method: PackagedMethod | None) -> Iterator[_Steps]:
    """Yields the recorded sequences that have state, or those up to the last call of the method."""
    found = False
    with PackageReader(path) as reader:
        if reader.manifest != manifest:
            raise DigestMismatchError(f"{path} was replaced while it was read", hint="Run it again.")
        for case in manifest.cases:
            calls = [number for number, call in enumerate(case.calls) if method and call.method == method.name]
            if edge_case_in(reader, case):
                continue
            sequence = method is None and any(manifest.method(call.method).state for call in case.calls)
            if calls or sequence:
                found = True
                yield _Steps(case, load_safetensors(reader.read(case.record)), calls[-1] if calls else None)
    if not found and method is None and not manifest.state:
        raise UsageError(f"{manifest.name} has no state", hint="Leave out --sequence.")
    if not found:
        what = "a session" if method is None else method.name
        raise UsageError(f"the package {manifest.name} has no recorded call of {what}", hint="Give --size.")


def _drawn(
    manifest: Manifest,
    method: PackagedMethod | None,
    eager: EagerMethods | None,
    device: torch.device,
    options: PackageOptions,
) -> Iterator[_Steps]:
    """Yields sequences that are drawn at the sizes of --size."""
    if eager is None:
        raise UsageError("--size needs the eager model to draw inputs", hint="Leave it out to time the recorded cases.")
    methods = manifest.methods
    alone = method if method is not None and not method.state else None
    for text in options.sizes:
        sizes = parse_sizes(text, alone.call if alone else session_call(methods))
        if alone:
            drawn = [draw_call(eager, alone, sizes, options.seed)]
        else:
            drawn = draw_session(eager, methods, sizes, options.seed)
        numbers = [number for number, call in enumerate(drawn) if method and call.method == method.name]
        if method is not None and not numbers:
            raise UsageError(f"the spec's draw_sequence draws no call of {method.name}", hint="Leave out --size.")
        placed = [DrawnCall(each.method, on_device(each.bound, device), each.sizes) for each in drawn]
        made = record_case(eager, methods, manifest.state, placed, tf32=manifest.provenance.tf32)
        case = Case(
            record="",
            calls=made.calls,
            reference_dtype=made.reference_dtype,
            state_accuracy=dict(made.state_accuracy),
        )
        yield _Steps(case, load_safetensors(made.tensors), numbers[-1] if numbers else None, fresh=True)


# --- who makes the calls ----------------------------------------------------------------------------------------------


@dataclass
class _Contender:
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
    within: Within
    assign: Callable[[], object] = lambda: None
    load_ms: float | None = None
    now: Callable[[], Mapping[str, Tensor]] = field(default=dict)
    settle: Callable[[], object] = lambda: None


def _ours(loaded: TimedPackage, steps: _Steps, stack: ExitStack) -> _Contender:
    model: Model = loaded.model
    manifest = model.manifest
    if not any(manifest.method(call.method).state for call in steps.case.calls):
        return _Contender(loaded.name, loaded.what, {}, model.methods, _nothing, load_ms=loaded.load_ms)
    session = stack.enter_context(model.session(**state_sizes(manifest, steps.case)))
    state = dict(session.state)
    return _Contender(
        loaded.name, loaded.what, state, session.methods, _nothing, load_ms=loaded.load_ms, now=lambda: state
    )


def _eager(way: EagerWay, eager: EagerMethods, manifest: Manifest, steps: _Steps) -> _Contender:
    """The eager model with buffers of its own, which its calls write without any help of ours."""
    sizes = state_sizes(manifest, steps.case)
    state = {buffer.name: buffer.at(sizes) for buffer in eager.buffers}
    placed = {name: state[buffer.name] for buffer in eager.buffers for name in buffer.names}
    places = {name: place_of(eager.spec.model, name) for name in placed}

    @contextmanager
    def within() -> Iterator[None]:
        with holding(eager.spec.model, placed), way.within():
            yield

    def assign() -> None:
        for name, (module, key) in places.items():
            module._buffers[key] = placed[name]

    def now() -> dict[str, Tensor]:
        found = {name: module._buffers[key] for name, (module, key) in places.items()}
        return {name: tensor for name in state if (tensor := found[name]) is not None}

    used = {call.method for call in steps.case.calls}
    methods = {name: way.of(entry.model) for name, entry in eager.specs.items() if name in used}
    return _Contender(way.name, way.what, state, methods, within, assign, now=now)


def _onnx(
    options: PackageOptions, first: Path, manifest: Manifest, steps: _Steps, device: torch.device, beside: _Contender
) -> _Contender:
    """ONNX Runtime, which is given the state and gives it back. It begins with the state that another contender has."""
    assert options.onnx is not None
    path = options.onnx
    used = {call.method for call in steps.case.calls[: steps.count]}
    onnx = OnnxSteps(path, device, Trust(options.trust.keys).demand(), used)
    check_interface(path, onnx.manifest.methods, first, manifest.methods)
    if [(each.name, each.dtype, each.shape) for each in onnx.manifest.state] != [
        (each.name, each.dtype, each.shape) for each in manifest.state
    ]:
        raise UsageError(f"{path} has another state than {first.name}", hint="Export both from the same model.")
    state = {name: tensor.clone() for name, tensor in beside.state.items()}

    def assign() -> None:
        onnx.state = dict(state)

    return _Contender(
        ONNX_RUNTIME, onnx.what, state, onnx.methods, nullcontext, assign, onnx.load_ms, lambda: onnx.state, onnx.settle
    )


def _nothing() -> AbstractContextManager[Any]:
    return nullcontext()


class _Calls:
    """The calls of a session by one contender."""

    def __init__(self, contender: _Contender, steps: _Steps, manifest: Manifest, device: torch.device) -> None:
        self._contender, self._manifest, self._steps = contender, manifest, steps
        self._calls: list[Callable[[], Any]] = []
        self._restored: list[tuple[Tensor, Tensor]] = []  # what calls write, and what it was
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

    def restore(self) -> None:
        """Puts everything back to what it was before what is timed."""
        self._contender.assign()
        for name, tensor in self._contender.state.items():
            tensor.copy_(self._start[name])
        for tensor, before in self._restored:
            tensor.copy_(before)

    def answers(self) -> tuple[dict[str, Tensor], dict[int, str]]:
        """Makes all calls. Returns what they answer, as a case's file has it, and the structures of the results.

        What is timed begins, from then on, with the state before it.
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


def _row(
    path: Path,
    steps: _Steps,
    loaded: Sequence[TimedPackage],
    eager: EagerMethods | None,
    note: str | None,
    device: torch.device,
    options: PackageOptions,
) -> Row:
    manifest = loaded[0].model.manifest
    failed = [Measurement(name, "the eager model", note=note) for name in alternatives(options) if note]
    ready: list[Alternative] = []
    errors: dict[str, float | None] = {}
    load_ms: dict[str, float | None] = {}
    with ExitStack() as stack:
        contenders = [_ours(each, steps, stack) for each in loaded]
        if options.onnx is not None:
            contenders.append(_onnx(options, path, manifest, steps, device, contenders[0]))
        if eager is not None:
            torch._dynamo.reset()  # otherwise the next sequence would be compiled with dynamic shapes
            replaced = _replaceable(eager, manifest, steps, device)
            contenders += [_eager(way, eager, manifest, steps) for way in eager_ways(manifest, replaced, options)]
        for contender in contenders:
            calls = _Calls(contender, steps, manifest, device)
            verdict = _judged(contender, calls, steps, manifest)
            if isinstance(verdict, Match):
                errors[contender.name] = max((one.error.rms for one in verdict.outputs if one.error), default=None)
                load_ms[contender.name] = contender.load_ms
                ready.append(
                    Alternative(contender.name, contender.what, [calls.timed()], contender.within, before=calls.restore)
                )
            elif contender.name in COMPILERS:
                failed.append(Measurement(contender.name, contender.what, note=verdict))
            else:
                raise WrongResultError(
                    f"the results of {contender.name} differ from eager's in {steps.label}: {verdict}",
                    hint="It was not timed. `exportkit verify` shows details.",
                )
        timed = measure(ready, device, options.seconds, graphs=False)
    measured = [msgspec.structs.replace(m, load_ms=load_ms[m.name], error=errors[m.name]) for m in timed]
    return steps.row(manifest, (*measured, *failed))


def _judged(contender: _Contender, calls: _Calls, steps: _Steps, manifest: Manifest) -> Match | str:
    """Returns that a contender's results agree with eager's, or how they differ."""
    try:
        with contender.within():
            answers, structures = calls.answers()
    except Exception as error:
        if contender.name not in COMPILERS:
            raise
        # An error of a compiler is a result of the comparison.
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    expected = dict(steps.tensors)
    if steps.count < len(steps.case.calls):  # the state was recorded after calls that were not made
        expected = {key: tensor for key, tensor in expected.items() if not key.startswith("state")}
    judge = Judge(manifest, VerifyOptions(), fresh=steps.fresh)
    verdict = judge.verdict(
        ReplayTask(steps.label, steps.case, Path()), expected, answers, structures, range(steps.count)
    )
    return verdict if isinstance(verdict, Match) else verdict.message


def _replaceable(eager: EagerMethods, manifest: Manifest, steps: _Steps, device: torch.device) -> bool:
    """Returns whether references can replace the operators that the model calls."""
    forms = described_of(manifest)
    contender = _eager(EagerWay("eager", "the eager model"), eager, manifest, steps)
    try:
        with contender.within(), WithReferences(forms.values()), NoOperators({n.partition("::")[0] for n in forms}):
            _Calls(contender, steps, manifest, device).answers()
    except OperatorCalledError:
        return False
    return bool(forms)
