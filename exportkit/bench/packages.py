"""Times packages and their model: eager with operators, eager with references, and compiled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.bench.contestants import (
    COMPILERS,
    PackageOptions,
    alternatives,
    check_interface,
    described_of,
    dtype_of,
    eager_model,
    eager_ways,
    load_packages,
)
from exportkit.bench.onnx_runtime import ONNX_RUNTIME, load_onnx
from exportkit.bench.package_sizes import parse_sizes
from exportkit.bench.references import NoOperators, OperatorCalledError, WithReferences
from exportkit.bench.results import Measurement, Row
from exportkit.bench.sessions import session_rows
from exportkit.bench.timing import Alternative, Within, measure
from exportkit.errors import UsageError, WrongResultError
from exportkit.export.models.call_signature import describe_call
from exportkit.export.models.resolve import load_operator_libraries
from exportkit.export.record.cases import draw_inputs, eager_mode
from exportkit.export.record.reference import references
from exportkit.export.record.tolerances import accuracy_outputs
from exportkit.export.torch_patches.gradients import call_model
from exportkit.package.case_files import recorded_errors
from exportkit.package.manifest import Call, Manifest, PackagedMethod
from exportkit.package.trust import Trust
from exportkit.progress import Progress
from exportkit.runtime.model import Model
from exportkit.sizes import label_of
from exportkit.spec import ExportSpec
from exportkit.verify.compare import Reference, compare_outputs
from exportkit.verify.outcomes import Match


@dataclass(frozen=True)
class _Variant:
    """One way to call the model, whose results are not yet checked."""

    name: str
    what: str
    function: Callable[..., Any]
    within: Within = nullcontext
    load_ms: float | None = None


_Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_MAX_SETS = 4
_ENOUGH_BYTES = 128 << 20  # of inputs to rotate through


def bench_packages(
    paths: Sequence[Path], device: torch.device, options: PackageOptions, progress: Progress
) -> Iterator[Row]:
    """Times packages at each size. Everything is compared with the first package.

    Args:
        paths: The packages, with equal inputs and outputs.
        device: A device of this machine.
        options: The alternatives and the sizes.
        progress: Called with a description of each step.

    Raises:
        UsageError: The packages take different inputs, a size is invalid, or MODEL must be named or is not found.
        WrongResultError: A package's results differ from eager's. It is not timed.
        PackageError: A package is bad.
    """
    load_operator_libraries(options.eager.op_libraries)
    with ExitStack() as stack:
        loaded = load_packages(paths, device, options, stack, progress)
        manifest = loaded[0].model.manifest
        method = None if options.sequence else _method(manifest, options.method)
        eager, note = eager_model(manifest, device, options, stack, progress)
        stack.enter_context(eager_mode(tf32=manifest.provenance.tf32))
        if method is None or method.state or any(each.written for each in method.call.inputs):
            yield from session_rows(paths[0], loaded, method, eager, note, device, options, progress)
            return
        variants = [
            _Variant(each.name, each.what, each.model.methods[method.name], load_ms=each.load_ms) for each in loaded
        ]
        if options.onnx is not None:
            variants.append(_onnx(options, method, paths[0], device, progress))
        spec = eager.specs[method.name] if eager is not None else None
        for sizes, inputs in _inputs(loaded[0].model, method, spec, options):
            progress(f"{paths[0].name} at {label_of(sizes)}")
            row = _row(loaded[0].model, method, variants, spec, note, sizes, inputs, device, options)
            for each in loaded:
                each.model.synchronize()  # a package that refuses a value was not timed
            yield row


def _method(manifest: Manifest, name: str | None) -> PackagedMethod:
    """Returns the method to time."""
    try:
        return manifest.method(name)
    except UsageError as error:
        hint = f"{error.hint} --method times one, --sequence times calls of several in a session."
        raise UsageError(error.message, hint=hint) from error


def _onnx(
    options: PackageOptions, method: PackagedMethod, first: Path, device: torch.device, progress: Progress
) -> _Variant:
    assert options.onnx is not None
    progress(f"loading {options.onnx.name}")
    start = time.perf_counter()
    onnx = load_onnx(options.onnx, device, Trust(options.trust.keys).demand(), method.name)
    took = (time.perf_counter() - start) * 1e3
    check_interface(options.onnx, [onnx.method], first, [method])
    return _Variant(ONNX_RUNTIME, onnx.what, onnx, load_ms=took)


def _inputs(
    model: Model, method: PackagedMethod, spec: ExportSpec | None, options: PackageOptions
) -> Iterator[tuple[dict[str, int], list[_Inputs]]]:
    """Returns (sizes, sets of (args, kwargs) on the device) for each size to time."""
    call = method.call
    if not options.sizes:
        recorded = [
            call for case in model.cases for call in case.calls if call.method == method.name and not case.edge_case
        ]
        if not recorded:
            raise UsageError(
                f"the package {model.manifest.name} has no recorded call of {method.name}", hint="Give --size."
            )
        for each in recorded:
            yield dict(each.sizes), [(each.args, dict(each.kwargs))]
        return
    if spec is None:
        raise UsageError("--size needs the eager model to draw inputs", hint="Leave it out to time the recorded cases.")
    for text in options.sizes:
        sizes = parse_sizes(text, call)
        first = draw_inputs(spec, call, sizes, options.seed)
        count = min(_MAX_SETS, math.ceil(_ENOUGH_BYTES / max(1, sum(t.nbytes for t in _tensors(first)))))
        drawn = [first, *(draw_inputs(spec, call, sizes, options.seed + 1 + i) for i in range(count - 1))]
        yield sizes, [tree_map_only(Tensor, lambda t: t.to(model.device), one) for one in drawn]


def _row(
    package: Model,
    method: PackagedMethod,
    loaded: Sequence[_Variant],
    spec: ExportSpec | None,
    note: str | None,
    sizes: Mapping[str, int],
    inputs: Sequence[_Inputs],
    device: torch.device,
    options: PackageOptions,
) -> Row:
    manifest = package.manifest
    expected = _expected(package, method, spec, sizes, inputs[0])
    variants = [*loaded, *_eager_variants(spec, manifest, expected.replaced, options)]
    ready: list[Alternative] = []
    errors: dict[str, float | None] = {}
    failed = [Measurement(name, "the eager model", note=note) for name in alternatives(options) if note]
    for variant in variants:
        verdict = _judged(variant, inputs[0], method.call, expected)
        if isinstance(verdict, Match):
            errors[variant.name] = max((one.error.rms for one in verdict.outputs if one.error), default=None)
            calls = [partial(variant.function, *args, **kwargs) for args, kwargs in inputs]
            ready.append(Alternative(variant.name, variant.what, calls, variant.within))
        elif variant.name in COMPILERS:
            failed.append(Measurement(variant.name, variant.what, note=verdict))
        else:
            raise WrongResultError(
                f"the results of {variant.name} differ from eager's at {label_of(sizes)}: {verdict}",
                hint="It was not timed. `exportkit verify` shows details.",
            )
    load_ms = {one.name: one.load_ms for one in loaded}
    # No graphs: AOTInductor's runtime queries events while it runs, which a capture does not allow.
    timed = measure(ready, device, options.seconds, graphs=False)
    measured = [msgspec.structs.replace(m, load_ms=load_ms.get(m.name), error=errors[m.name]) for m in timed]
    return Row(
        subject=manifest.name if len(manifest.methods) == 1 else f"{manifest.name} {method.name}",
        size=label_of(sizes),
        dtype=dtype_of(method.call),
        direction="forward",
        moved_bytes=None,
        limit=None,
        measurements=(*measured, *failed),
    )


@dataclass(frozen=True)
class _Expected:
    """Eager's results, what they are compared by, and whether references replaced operators for them."""

    outputs: Sequence[Tensor]
    reference: Reference | None
    replaced: bool = False


def _expected(
    package: Model, method: PackagedMethod, spec: ExportSpec | None, sizes: Mapping[str, int], inputs: _Inputs
) -> _Expected:
    """Calls eager. Without an eager model, returns the recorded results of the export."""
    manifest = package.manifest
    errors = recorded_errors(manifest.cases, method.name)
    if spec is None:
        drawn = (case for case in package.cases if not case.edge_case)
        recorded = (call for case in drawn for call in case.calls if call.method == method.name)
        call = next(call for call in recorded if dict(call.sizes) == dict(sizes))
        return _Expected(_tensors(call.outputs), Reference(call.references, errors))
    try:
        forms = described_of(manifest)
        with WithReferences(forms.values()), NoOperators({name.partition("::")[0] for name in forms}):
            outputs, replaced = _called(spec, inputs), bool(forms)
    except OperatorCalledError:
        outputs, replaced = _called(spec, inputs), False
    bound = describe_call(spec.model, *inputs)
    described, tf32 = method.call.outputs, manifest.provenance.tf32
    wanted = accuracy_outputs(described, spec.tolerances)
    with eager_mode():
        known = references(spec.model, bound, outputs, described, wanted, tf32=tf32)
    return _Expected(outputs, Reference(known.outputs, errors, fresh=True) if known else None, replaced)


def _called(spec: ExportSpec, inputs: _Inputs) -> list[Tensor]:
    args, kwargs = tree_map_only(Tensor, torch.clone, inputs)
    return _tensors(call_model(spec.model, args, kwargs))


def _eager_variants(
    spec: ExportSpec | None, manifest: Manifest, replaced: bool, options: PackageOptions
) -> list[_Variant]:
    if spec is None:
        return []
    torch._dynamo.reset()  # otherwise the next size would be compiled with dynamic shapes
    return [
        _Variant(way.name, way.what, way.of(spec.model), way.within) for way in eager_ways(manifest, replaced, options)
    ]


def _judged(variant: _Variant, inputs: _Inputs, call: Call, expected: _Expected) -> Match | str:
    """Returns that a variant's results agree with the expected ones, or how they differ."""
    args, kwargs = tree_map_only(Tensor, torch.clone, inputs)
    try:
        with variant.within():
            answer = _tensors(variant.function(*args, **kwargs))
    except Exception as error:
        if variant.name not in COMPILERS:
            raise
        # An error of a compiler is a result of the comparison.
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    verdict = compare_outputs(call.outputs, expected.outputs, answer, reference=expected.reference)
    return verdict if isinstance(verdict, Match) else verdict.message


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
