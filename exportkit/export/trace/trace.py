"""Traces a model: each of its methods to an ExportedProgram, with its state, its cases and their description."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from exportkit.errors import ExportError, UsageError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.call_signature import BoundCall, bind_call
from exportkit.export.models.method_specs import method_specs
from exportkit.export.models.option_parsing import parse_places, parse_ranges, size_of
from exportkit.export.models.placement import parse_floating, prepared
from exportkit.export.models.resolved import EagerModel
from exportkit.export.provenance import provenance
from exportkit.export.record.cases import MAX_CASE_BYTES, state_sha256
from exportkit.export.record.eager_methods import DescribedModel, EagerMethods
from exportkit.export.record.eager_run import run_eagerly
from exportkit.export.record.record import MAX_CASES_BYTES, RecordedCase, record_cases, record_run
from exportkit.export.record.sequences import draw_calls
from exportkit.export.sizes.shapes import DynamicSizes, Shapes, dynamic_sizes, merge_shapes, with_ranges
from exportkit.export.sizes.torch_sizes import with_plain_shapes
from exportkit.export.torch_patches.opaque import opaque_operators
from exportkit.export.trace.describe_state import describe_state
from exportkit.export.trace.edge_cases import edge_cases
from exportkit.export.trace.inferred_sizes import with_inferred
from exportkit.export.trace.preflight import check_composites, describe_operators, graph_operators
from exportkit.export.trace.program_check import check_programs
from exportkit.export.trace.torch_export import TracingTask
from exportkit.export.trace.trace_method import TracedTask, trace_method
from exportkit.export.trace.traced import Traced
from exportkit.package.manifest import Source
from exportkit.progress import Progress
from exportkit.sizes import input_bytes, label_of
from exportkit.spec import ExportSpec

_TRAINED_OTHERWISE = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)


def trace(model: EagerModel, options: TraceOptions, device: torch.device, progress: Progress) -> Traced:
    """Checks a model, traces its methods and records cases.

    Raises:
        UsageError: An option names an unknown parameter, dimension, dtype or buffer.
        OperatorNotExportableError: A custom operator cannot be packed.
        ExportError: torch.export refused the model. The message explains why.
    """
    floating = parse_floating(options.dtype)
    free = _free(model.spec, options)
    if any(each.training and isinstance(each, _TRAINED_OTHERWISE) for each in model.spec.model.modules()):
        progress("dropout and batch normalization are exported as after model.eval()")
    with ready_to_trace(model, options, device) as (eager, tasks):
        spec = eager.spec
        traced = [
            trace_method(eager, name, *task, options, device, progress, values=not free) for name, task in tasks.items()
        ]
        methods = tuple(each.method for each in traced)
        state, initial = describe_state(eager.buffers, methods, cast=floating, values=not free)
        described = DescribedModel(eager, [method.packaged for method in methods], state, device, options.tf32)
        examples = {name: sizes.example for name, (_, sizes) in tasks.items()}
        cases = record_cases(described, examples, options, progress)
        tried = _tried_cases(described, traced, options.seed, progress)
        if options.edge_cases and options.cases > 1 and not free:
            cases += edge_cases(described, methods, cases, options, progress)
        progress("comparing the program with the cases")
        cases += tried
        check_programs(described, traced, cases, values=not free)
        source = Source(
            model=model.name,
            model_kwargs=dict(model.model_kwargs),
            dtype=options.dtype,
            seed=model.seed,
            state_sha256=state_sha256(spec.model, spec.state),
        )
    operators = {k: v for each in methods for k, v in graph_operators(each.program.graph_module).items()}
    return Traced(
        methods=methods,
        operators=describe_operators(operators),
        cases=cases,
        source=source,
        provenance=provenance(tf32=options.tf32),
        name=options.name or spec.name or _class_name(spec.model),
        state=state,
        initial=initial,
    )


@contextmanager
def ready_to_trace(
    model: EagerModel, options: TraceOptions, device: torch.device
) -> Iterator[tuple[EagerMethods, dict[str, tuple[TracingTask, DynamicSizes]]]]:
    """Yields a model on its device and in its dtype, and by method what to trace, with its dynamic sizes."""
    spec = _declared(with_plain_shapes(model.spec), options)
    with opaque_operators(), prepared(spec, device, parse_floating(options.dtype)) as spec:
        eager = EagerMethods(spec)
        if options.static and (fixed := [each for each in eager.buffers if each.dimension]):
            raise UsageError(
                f"--static fixes every size, and the first axis of the state {fixed[0].name} is `{fixed[0].dimension}`",
                hint="Leave out --static, or the dimension of the state.",
            )
        tasks = {}
        for name, each in eager.specs.items():
            bound = eager.bind(name, each.example_inputs, each.example_kwargs)
            eager.written(name, bound)  # refuses a name that no input has
            tasks[name] = TracingTask(each, bound, eager.buffers, repeats=not _free(spec, options))
            check_composites(spec.model, partial(_called, spec, name, bound), device)
        shapes = _shapes(tasks, options)
        yield eager, {name: (task, dynamic_sizes(shapes[name], task.examples)) for name, task in tasks.items()}


def _free(spec: ExportSpec, options: TraceOptions) -> bool:
    return options.allow_nondeterministic or spec.allow_nondeterministic


def _called(spec: ExportSpec, name: str, bound: BoundCall, model: torch.nn.Module) -> object:
    return EagerMethods(replace(spec, model=model)).session().call(name, bound)


def _declared(spec: ExportSpec, options: TraceOptions) -> ExportSpec:
    """Returns the spec with the state and the written inputs that the options declare."""
    if options.state:
        spec = replace(spec, state={**spec.state_dimensions, **dict.fromkeys(options.state)})
    if not options.writes:
        return spec
    if not spec.methods:
        return replace(spec, writes=(*spec.writes, *options.writes))
    parameters = {
        name: bind_call(each.model, tuple(each.example_inputs), each.example_kwargs)
        for name, each in method_specs(spec).items()
    }
    methods = dict(spec.methods)
    for each in options.writes:
        having = [name for name, known in parameters.items() if each.partition(".")[0] in known]
        if not having:
            raise UsageError(f"--writes {each}: no method has an input of that name")
        for name in having:
            methods[name] = replace(methods[name], writes=(*methods[name].writes, each))
    return replace(spec, methods=methods)


def _shapes(tasks: Mapping[str, TracingTask], options: TraceOptions) -> dict[str, Shapes]:
    """Returns the dynamic shapes of each method. An option is for each method that has the tensor."""
    if options.static:
        return {name: {} for name in tasks}
    given, ranges = parse_places(options.dynamic), parse_ranges(options.ranges)
    found: dict[str, Shapes] = {}
    for name, task in tasks.items():
        own = given if len(tasks) == 1 else {t: dims for t, dims in given.items() if t in task.bound.names}
        found[name] = with_ranges(with_inferred(task, merge_shapes(task.spec.dynamic_shapes, own), ranges), ranges)
    for tensor in given:
        if not any(tensor in shapes for shapes in found.values()):
            raise UsageError(f"--dynamic {tensor}:...: no method has a tensor input {tensor!r}")
    texts = [text for shapes in found.values() for dims in shapes.values() for text in dims.values()]
    names = {size.dimension: text for text in texts if (size := size_of(text))}
    if unknown := [name for name in ranges if name not in names]:
        raise UsageError(
            f"--range {unknown[0]}=...: no size has the name `{unknown[0]}`",
            hint=f"There are {', '.join(names)}." if names else "Give sizes names with --dynamic or dynamic_shapes.",
        )
    return found


def _class_name(model: torch.nn.Module) -> str:
    """Returns the default name of a package: the class's, in the letters that a name may have."""
    ascii_name = unicodedata.normalize("NFKD", type(model).__name__).encode("ascii", "ignore").decode()
    return ascii_name.strip("_")[:128] or "model"


_CASES = 4  # so many for each method


def _tried_cases(
    model: DescribedModel, traced: Sequence[TracedTask], seed: int, progress: Progress
) -> tuple[RecordedCase, ...]:
    """Records cases of the sizes at which programs were tried, as far as they are small: they are tried for ever."""
    examples = {name: size for each in traced for name, size in each.sizes.example.items()}
    cases: list[RecordedCase] = []
    for each in traced:
        method = each.method.packaged
        fitting = [sizes for sizes in each.tried if input_bytes(method.call, sizes) <= MAX_CASE_BYTES]
        for number, sizes in enumerate(fitting[:_CASES]):
            progress(f"recording a case at {label_of(sizes)}")
            drawn = draw_calls(model, method, {**examples, **sizes} if method.state else sizes, seed + number)
            try:
                case = record_run(run_eagerly(model, drawn))
            except ExportError:
                continue  # a session of these sizes that eager refuses
            if len(case.tensors) <= MAX_CASES_BYTES // 8:
                cases.append(case)
    return tuple(cases)
