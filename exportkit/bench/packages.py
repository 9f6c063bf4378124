"""Times packages and their model: eager with operators, eager with references, and compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from exportkit.bench import contenders
from exportkit.bench.contenders import Calls, Contender, OnnxSteps
from exportkit.bench.results import Measurement, Row
from exportkit.bench.steps import Steps, StepsOf
from exportkit.bench.timed_models import (
    COMPILERS,
    PackageOptions,
    TimedPackage,
    alternatives,
    check_interface,
    eager_model,
    eager_ways,
    load_packages,
)
from exportkit.bench.timing import Alternative, measure
from exportkit.errors import UsageError, WrongResultError
from exportkit.export.models.resolve import load_operator_libraries
from exportkit.export.record.cases import eager_mode
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.package.manifest import Manifest, PackagedMethod
from exportkit.package.trust import Trust
from exportkit.progress import Progress
from exportkit.verify.judging import Judge
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Match, Unjudged
from exportkit.verify.replayer import ReplayTask


def bench_packages(
    paths: Sequence[Path], device: torch.device, options: PackageOptions, progress: Progress
) -> Iterator[Row]:
    """Times packages at each size. Everything is compared with the first package.

    Raises:
        UsageError: The packages take different inputs, a size is invalid, or MODEL must be named or is not found.
        WrongResultError: A package's results differ from eager's. It is not timed.
        PackageError: A package is bad.
    """
    load_operator_libraries(options.eager.op_libraries)
    with ExitStack() as stack:
        loaded = load_packages(paths, device, options, stack, progress)
        manifest = loaded[0].model.manifest
        method = manifest.method(options.method)
        eager, note = eager_model(manifest, device, options, stack, progress)
        stack.enter_context(eager_mode(tf32=manifest.provenance.tf32))
        onnx = _onnx(options, paths[0], manifest, method, device, progress)
        rows = _Rows(loaded, eager, note, onnx, device, options)
        for steps in StepsOf(paths[0], loaded[0].model, method, eager, device, options).all():
            progress(f"{paths[0].name}, {steps.label}")
            row = rows.row(steps)
            for each in loaded:
                each.model.synchronize()  # a package that refuses a value was not timed
            yield row


def _onnx(
    options: PackageOptions,
    first: Path,
    manifest: Manifest,
    method: PackagedMethod,
    device: torch.device,
    progress: Progress,
) -> OnnxSteps | None:
    """Loads the ONNX models of what is called: a method without state, or all of them."""
    if (path := options.onnx) is None:
        return None
    progress(f"loading {path.name}")
    called = manifest.methods if method.state else (method,)
    onnx = OnnxSteps(path, device, Trust(options.trust.keys).demand(), [each.name for each in called])
    check_interface(path, [onnx.manifest.method(each.name) for each in called], first, called)
    theirs, ours = (
        [(state.name, state.dtype, state.shape) for state in each.state] for each in (onnx.manifest, manifest)
    )
    if theirs != ours and any(each.state for each in called):
        raise UsageError(f"{path} has another state than {first.name}", hint="Export both from the same model.")
    return onnx


@dataclass(frozen=True)
class _Rows:
    """What is timed side by side. Without an eager model, the note says why there is none."""

    loaded: Sequence[TimedPackage]
    eager: EagerMethods | None
    note: str | None
    onnx: OnnxSteps | None
    device: torch.device
    options: PackageOptions

    def row(self, steps: Steps) -> Row:
        """Times calls. Only what answers as eager does is timed."""
        manifest, note = self.loaded[0].model.manifest, self.note
        failed = [Measurement(name, "the eager model", note=note) for name in alternatives(self.options) if note]
        ready: list[Alternative] = []
        known: dict[str, tuple[float | None, float | None]] = {}
        with ExitStack() as stack:
            for contender in self._contenders(steps, stack):
                calls = Calls(contender, steps, manifest, self.device)
                verdict = _judged(contender, calls, steps, manifest)
                if not isinstance(verdict, str):
                    error = max((one.error.rms for one in verdict.outputs if one.error), default=None)
                    known[contender.name] = contender.load_ms, error
                    sets = (Calls(contender, replace(steps, tensors=t), manifest, self.device) for t in steps.others)
                    timed = [each.timed() for each in (calls, *sets)]
                    ready.append(Alternative(contender.name, contender.what, timed, contender.within, calls.before))
                elif contender.name in COMPILERS:
                    failed.append(Measurement(contender.name, contender.what, note=verdict))
                else:
                    said = f"the results of {contender.name} differ from eager's in {steps.label}: {verdict}"
                    raise WrongResultError(said, hint="It was not timed. `exportkit verify` shows details.")
            # No graphs: AOTInductor's runtime queries events while it runs, which a capture does not allow.
            found = measure(ready, self.device, self.options.seconds, graphs=False)
        measured = [msgspec.structs.replace(m, load_ms=known[m.name][0], error=known[m.name][1]) for m in found]
        return steps.row(manifest, (*measured, *failed))

    def _contenders(self, steps: Steps, stack: ExitStack) -> list[Contender]:
        manifest = self.loaded[0].model.manifest
        found = [contenders.ours(each, steps, stack) for each in self.loaded]
        if self.onnx is not None:
            found.append(contenders.onnx(self.onnx, found[0]))
        if self.eager is not None:
            torch._dynamo.reset()  # otherwise the next size would be compiled with dynamic shapes
            ways = eager_ways(manifest, steps.replaced, self.options)
            found += [contenders.eager(way, self.eager, manifest, steps) for way in ways]
        return found


def _judged(contender: Contender, calls: Calls, steps: Steps, manifest: Manifest) -> Match | Unjudged | str:
    """Returns that a contender's results agree with eager's, or cannot be judged, or how they differ."""
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
    task = ReplayTask(steps.label, steps.case, Path(), moves=steps.moves)
    judge = Judge(manifest, VerifyOptions(), fresh=steps.fresh)
    verdict = judge.verdict(task, expected, answers, structures, range(steps.count))
    return verdict if isinstance(verdict, Match | Unjudged) else verdict.message
