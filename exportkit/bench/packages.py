"""Times packages and their model: eager with operators, eager with references, and compiled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.bench.onnx_runtime import ONNX_RUNTIME, load_onnx
from exportkit.bench.package_sizes import parse_sizes
from exportkit.bench.references import NoOperators, OperatorCalledError, WithReferences
from exportkit.bench.results import OURS, OURS_EAGER, OURS_GRAPHS, Measurement, Row
from exportkit.bench.timing import Alternative, Within, measure
from exportkit.eager_source import EagerSource, unnamed
from exportkit.errors import UsageError, WrongResultError
from exportkit.export.call_signature import describe_call
from exportkit.export.cases import draw_inputs, eager_mode, state_sha256
from exportkit.export.eager_model import rebuild_eager
from exportkit.export.reference import references
from exportkit.export.resolve import load_operator_libraries
from exportkit.export.tolerances import accuracy_outputs
from exportkit.installed import DescribedOperator, described_operators
from exportkit.package.case_files import recorded_errors
from exportkit.package.manifest import Call, Manifest
from exportkit.package.trust import Trust
from exportkit.progress import Progress
from exportkit.runtime.loader import load
from exportkit.runtime.model import Model
from exportkit.sizes import label_of
from exportkit.spec import ExportSpec
from exportkit.verify.compare import Reference, compare_outputs
from exportkit.verify.outcomes import Match

EAGER, COMPILE, REDUCE_OVERHEAD = "eager", "compile", "reduce-overhead"
ALTERNATIVES = (EAGER, COMPILE)

COMPILERS: Mapping[str, Mapping[str, Any]] = {
    COMPILE: {},
    "max-autotune": {"mode": "max-autotune"},
    REDUCE_OVERHEAD: {"mode": "reduce-overhead"},
    "freezing": {"options": {"freezing": True}},
}
"""Ways to compile the eager model, with the arguments of torch.compile."""

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_MAX_SETS = 4
_ENOUGH_BYTES = 128 << 20  # of inputs to rotate through


@dataclass(frozen=True)
class PackageOptions:
    """The alternatives and the sizes to time.

    Attributes:
        against: "eager" and names of COMPILERS. None takes eager and "compile" if the eager model can be made, and
            "reduce-overhead" with `cuda_graphs`.
        sizes: Sizes such as "batch=8,gh=28,gw=28". Empty: the sizes of the recorded cases.
        seconds: The time for each alternative at each size.
        seed: The seed of the inputs.
        eager: The eager model, and operator libraries for packages that do not contain them.
        onnx: An ONNX model with the package's inputs and outputs, which ONNX Runtime runs on the CPU. Its signature is
            beside it.
        trust: Who must have signed each package.
        cuda_graphs: Time the first package with CUDA graphs, too.
    """

    against: Sequence[str] | None = None
    sizes: Sequence[str] = ()
    seconds: float = 1.0
    seed: int = 0
    eager: EagerSource = EagerSource()
    onnx: Path | None = None
    trust: Trust = Trust()
    cuda_graphs: bool = False


@dataclass(frozen=True)
class _Variant:
    """One way to call the model, whose results are not yet checked."""

    name: str
    what: str
    function: Callable[..., Any]
    within: Within = nullcontext
    load_ms: float | None = None


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
        package, loaded = _load(paths, device, options, stack, progress)
        manifest = package.manifest
        spec, note = _eager(manifest, device, options, stack, progress)
        stack.enter_context(eager_mode(tf32=manifest.provenance.tf32))
        for sizes, inputs in _inputs(package, spec, options):
            progress(f"{paths[0].name} at {label_of(sizes)}")
            yield _row(package, loaded, spec, note, sizes, inputs, device, options)


def _load(
    paths: Sequence[Path],
    device: torch.device,
    options: PackageOptions,
    stack: ExitStack,
    progress: Progress,
) -> tuple[Model, list[_Variant]]:
    """Loads the packages and the ONNX model. Returns the first package, and all of them as variants."""
    trust: dict[str, Any] = {"public_key": options.trust.keys or None, "signature": options.trust.signature}
    models: list[Model] = []
    variants = []
    for path in paths:
        progress(f"loading {path.name}")
        start = time.perf_counter()
        model = stack.enter_context(load(path, device=str(device), **trust))
        took = (time.perf_counter() - start) * 1e3
        _check_interface(path, model.manifest.call, paths[0], models[0].manifest.call if models else None)
        what = f"exportkit.load, target {model.target.name}"
        variants.append(_Variant(str(path) if models else OURS, what, model, load_ms=took))
        models.append(model)
    if options.cuda_graphs:
        graphs = stack.enter_context(load(paths[0], device=str(device), cuda_graphs=True, **trust))
        variants.append(_Variant(OURS_GRAPHS, "exportkit.load(..., cuda_graphs=True)", graphs))
    if options.onnx is not None:
        progress(f"loading {options.onnx.name}")
        start = time.perf_counter()
        onnx = load_onnx(options.onnx, device, Trust(options.trust.keys).demand())
        took = (time.perf_counter() - start) * 1e3
        _check_interface(options.onnx, onnx.call, paths[0], models[0].manifest.call)
        variants.append(_Variant(ONNX_RUNTIME, onnx.what, onnx, load_ms=took))
    return models[0], variants


def _check_interface(path: Path, call: Call, first: Path, expected: Call | None) -> None:
    if expected is not None and _interface(call) != _interface(expected):
        raise UsageError(f"{path} and {first.name} have different inputs or outputs")


def _interface(call: Call) -> Any:
    """Returns the parts of a call that packages must have in common to be compared."""
    outputs = [(output.name, output.dtype) for output in call.outputs]
    return call.parameters, [(tensor.name, tensor.dtype, tensor.shape) for tensor in call.inputs], outputs


def _eager(
    manifest: Manifest, device: torch.device, options: PackageOptions, stack: ExitStack, progress: Progress
) -> tuple[ExportSpec | None, str | None]:
    """Returns the eager model on the device, or why there is none."""
    if options.against is not None and not options.against:
        return None, None
    by, source = options.trust.demanded_by(), manifest.source
    model = options.eager.model_of(source.model, by)
    if model is None:
        reason = unnamed(source.model, by)
        if options.against is not None:
            raise UsageError(f"cannot compare with eager: {reason}")
        return None, reason
    progress(f"making the eager model {model}")
    eager = replace(options.eager, model=model)
    spec = stack.enter_context(rebuild_eager(eager, source, manifest.methods, manifest.state, device))
    if state_sha256(spec.model, spec.state) != source.state_sha256:
        raise UsageError(
            f"the weights of {model} have changed since it was exported",
            hint="Export it again, or give the weights of the export (--weights).",
        )
    return spec, None


def _against(options: PackageOptions) -> Sequence[str]:
    if options.against is not None:
        return options.against
    return (*ALTERNATIVES, REDUCE_OVERHEAD) if options.cuda_graphs else ALTERNATIVES


def _inputs(
    model: Model, spec: ExportSpec | None, options: PackageOptions
) -> Iterator[tuple[dict[str, int], list[_Inputs]]]:
    """Returns (sizes, sets of (args, kwargs) on the device) for each size to time."""
    call = model.manifest.call
    if not options.sizes:
        if not model.cases:
            raise UsageError(f"the package {model.manifest.name} has no recorded cases", hint="Give --size.")
        for case in model.cases:
            yield dict(case.sizes), [(case.args, dict(case.kwargs))]
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
    loaded: Sequence[_Variant],
    spec: ExportSpec | None,
    note: str | None,
    sizes: Mapping[str, int],
    inputs: Sequence[_Inputs],
    device: torch.device,
    options: PackageOptions,
) -> Row:
    manifest = package.manifest
    expected = _expected(package, spec, sizes, inputs[0])
    variants = [*loaded, *_eager_variants(spec, manifest, expected.replaced, options)]
    ready: list[Alternative] = []
    errors: dict[str, float | None] = {}
    failed = [Measurement(name, "the eager model", note=note) for name in _against(options) if note]
    for variant in variants:
        verdict = _judged(variant, inputs[0], manifest, expected)
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
        subject=manifest.name,
        size=label_of(sizes),
        dtype=next((i.dtype for i in manifest.call.inputs if "float" in i.dtype), manifest.call.inputs[0].dtype),
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


def _expected(package: Model, spec: ExportSpec | None, sizes: Mapping[str, int], inputs: _Inputs) -> _Expected:
    """Calls eager. Without an eager model, returns the recorded results of the export."""
    manifest = package.manifest
    errors = recorded_errors(manifest.cases, manifest.method().name)
    if spec is None:
        case = next(case for case in package.cases if dict(case.sizes) == dict(sizes))
        return _Expected(_tensors(case.outputs), Reference(case.references, errors))
    try:
        forms = _described(manifest)
        with WithReferences(forms.values()), NoOperators({name.partition("::")[0] for name in forms}):
            outputs, replaced = _called(spec, inputs), bool(forms)
    except OperatorCalledError:
        outputs, replaced = _called(spec, inputs), False
    bound = describe_call(spec.model, *inputs)
    described, tf32 = manifest.call.outputs, manifest.provenance.tf32
    wanted = accuracy_outputs(described, spec.tolerances)
    with eager_mode():
        known = references(spec.model, bound, outputs, described, wanted, tf32=tf32)
    return _Expected(outputs, Reference(known.outputs, errors, fresh=True) if known else None, replaced)


def _described(manifest: Manifest) -> dict[str, DescribedOperator]:
    """Returns the operators of the package's namespaces that installed packages describe with references."""
    return described_operators(operator.name for operator in manifest.operators)


def _called(spec: ExportSpec, inputs: _Inputs) -> list[Tensor]:
    args, kwargs = tree_map_only(Tensor, torch.clone, inputs)
    return _tensors(spec.model(*args, **kwargs))


def _eager_variants(
    spec: ExportSpec | None, manifest: Manifest, replaced: bool, options: PackageOptions
) -> list[_Variant]:
    if spec is None:
        return []
    forms = _described(manifest)
    what = "the eager model"
    if forms:
        what += ", references for operators" if replaced else ", with its operators: it calls them through torch.ops"
    plain = WithReferences(forms.values()) if replaced else nullcontext()
    variants = []
    if EAGER in _against(options):
        variants.append(_Variant(EAGER, what, spec.model, lambda: plain))
        if replaced:
            variants.append(_Variant(OURS_EAGER, "the eager model", spec.model))
    torch._dynamo.reset()  # otherwise the next size would be compiled with dynamic shapes
    for name in _against(options):
        if name in COMPILERS:
            compiled = torch.compile(spec.model, dynamic=False, **COMPILERS[name])
            how = "torch.compile" if name == COMPILE else f"torch.compile with {name}"
            variants.append(_Variant(name, f"{how} of {what}", compiled, lambda: plain))
    return variants


def _judged(variant: _Variant, inputs: _Inputs, manifest: Manifest, expected: _Expected) -> Match | str:
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
    verdict = compare_outputs(manifest.call.outputs, expected.outputs, answer, reference=expected.reference)
    return verdict if isinstance(verdict, Match) else verdict.message


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
