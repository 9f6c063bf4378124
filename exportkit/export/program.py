"""From a model to an ExportedProgram with everything a package says of it."""

from __future__ import annotations

import copy
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils._pytree import tree_map

from exportkit import __version__
from exportkit.errors import ExportError, HostError, UsageError
from exportkit.export.cases import (
    RecordedCase,
    case_sizes,
    check_packable,
    draw_inputs,
    eager_mode,
    record_case,
    state_sha256,
)
from exportkit.export.explain import explain_export_error, guard_log
from exportkit.export.model import ResolvedModel
from exportkit.export.preflight import check_model, check_operators, describe_operators, graph_operators
from exportkit.export.shapes import (
    DynamicSizes,
    Symbols,
    dynamic_sizes,
    merge_shapes,
    parse_places,
    torch_dimensions,
    torch_shape,
)
from exportkit.export.signature import BoundCall, describe_call, is_tensor, plain_tuples
from exportkit.export.tolerances import output_tolerances
from exportkit.package import core
from exportkit.package.manifest import Call, Node, Operator, Provenance, Source, TensorInput, TensorOutput
from exportkit.package.structure import flatten, names
from exportkit.spec import ExportSpec

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Traced:
    """A program, and what the manifest says of it.

    Attributes:
        program: On the device it was traced for.
        call: Its signature and output structure.
        operators: The custom operators of its graph.
        cases: Recorded calls.
        source: What the eager model was.
        provenance: Where all this was done.
        name: Of the package.
    """

    program: torch.export.ExportedProgram
    call: Call
    operators: tuple[Operator, ...]
    cases: tuple[RecordedCase, ...]
    source: Source
    provenance: Provenance
    name: str


def trace(
    resolved: ResolvedModel,
    *,
    device: torch.device,
    dtype: str | None,
    dynamic: Sequence[str],
    static: bool,
    cases: int,
    seed: int,
    name: str | None,
    progress: Progress,
) -> Traced:
    """Checks, traces and asks a model; arguments and errors are those of `exportkit.export.export_aoti`."""
    if static and dynamic:
        raise UsageError("static and dynamic exclude each other")
    floating = parse_floating(dtype)
    shapes = {} if static else merge_shapes(resolved.spec.dynamic_shapes, parse_places(dynamic))
    with prepared(resolved.spec, device, floating) as spec:
        bound = describe_call(spec.model, spec.example_inputs, spec.example_kwargs)
        sizes = dynamic_sizes(shapes, {n: tuple(t.shape) for n, t in zip(bound.names, bound.tensors)})
        progress("checking the model and its operators")
        with eager_mode():
            result = check_model(lambda: spec.model(*bound.args, **bound.kwargs), device)
        output = describe_output(result)
        progress("tracing with torch.export")
        program = export_program(spec, bound, sizes)
        operators = graph_operators(program.graph_module)
        check_operators(operators, device)
        call = describe_program(program, bound, sizes, output, spec, cast=floating)
        recorded = []
        for number, wanted in enumerate(case_sizes(call, sizes.example, cases, seed)):
            progress(f"recording case {number + 1}")
            drawn = describe_call(spec.model, *draw_inputs(spec, call, wanted, seed + number))
            recorded.append(record_case(spec.model, on_device(drawn, device), wanted))
        source = Source(
            model=resolved.name,
            model_kwargs=dict(resolved.model_kwargs),
            dtype=dtype,
            seed=resolved.seed,
            state_sha256=state_sha256(spec.model),
        )
    return Traced(
        program=program,
        call=call,
        operators=describe_operators(operators),
        cases=tuple(recorded),
        source=source,
        provenance=provenance(),
        name=name or spec.name or package_name(spec.model),
    )


def export_program(spec: ExportSpec, bound: BoundCall, sizes: DynamicSizes) -> torch.export.ExportedProgram:
    """torch.export, with its errors explained.

    Raises:
        ExportError: It refused the model.
    """
    dims = torch_dimensions(sizes)
    shape_of = iter([torch_shape(sizes, dims, name) for name in bound.names])
    with guard_log() as log, plain_tuples(spec.model, bound.args, bound.kwargs) as (args, kwargs):
        # The same tree as the arguments, by parameter, with None for what is no tensor.
        arguments = {**dict(zip((p.name for p in bound.parameters), args)), **kwargs}
        dynamic = tree_map(lambda leaf: next(shape_of) if is_tensor(leaf) else None, arguments)
        try:
            with torch.no_grad():
                program = torch.export.export(spec.model, args, kwargs, dynamic_shapes=dynamic, strict=False)
        except Exception as error:
            # torch.export raises some thirty unrelated classes; the original is chained.
            raise explain_export_error(error, sizes, log) from error
    _refuse_mutation(program)
    return program


def describe_output(result: Any) -> Node:
    """The structure of what a model returned.

    Raises:
        UsageError: It holds something a manifest cannot describe.
        ExportError: It holds no tensor.
    """
    node, leaves = flatten(result, is_tensor, where="the model's output")
    if not leaves:
        raise ExportError("the model returns no tensor", hint="A compiled model returns at least one.")
    return node


def describe_program(
    program: torch.export.ExportedProgram,
    bound: BoundCall,
    sizes: DynamicSizes,
    output: Node,
    spec: ExportSpec,
    *,
    cast: torch.dtype | None = None,
) -> Call:
    """The manifest's account of a traced call.

    Args:
        program: The traced program.
        bound: The call it was traced with.
        sizes: What varies.
        output: The structure of what the model returned to that call.
        spec: For its tolerances.
        cast: The dtype that the model was cast to, if it was.

    Raises:
        UsageError: A tolerance is of no output.
        ExportError: A size is no multiple of one dimension, an output is a number that varies, or a dtype cannot be
            packed.
    """
    signature = program.graph_signature
    values = {n.name: n.meta.get("val") for n in program.graph.nodes}
    taken = _tensors(values, [s.arg for s in signature.input_specs if s.kind is InputKind.USER_INPUT])
    returned = [s.arg for s in signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    # Constants stay what they were; a size or .item() is another number at the next call.
    if varying := [i for i, arg in enumerate(returned) if not isinstance(arg, (TensorArgument, ConstantArgument))]:
        raise ExportError(
            f"output {varying[0]} of {len(returned)} is a number that is not the same for every call, such as a size",
            hint="Return it as a tensor, such as torch.scalar_tensor(x.shape[0]), or leave it out.",
        )
    given, output_names = _tensors(values, returned), names(output)
    if len(taken) != len(bound.tensors) or len(given) != len(output_names):
        raise ExportError(
            f"the traced program takes {len(taken)} tensors and returns {len(given)}; the model takes "
            f"{len(bound.tensors)} and returns {len(output_names)}",
            hint="What the model returns must have one structure, whatever its inputs.",
        )
    for name, value in zip((*bound.names, *output_names), (*taken, *given)):
        check_packable(name, value.dtype)
    symbols = Symbols(
        [(name, tuple(value.shape)) for name, value in zip(bound.names, taken)], sizes, program.range_constraints
    )
    inputs = tuple(
        TensorInput(name=name, dtype=dtype_name(value.dtype), shape=_input_shape(name, value, symbols))
        for name, value in zip(bound.names, taken)
    )
    tolerances = output_tolerances([(n, v.dtype) for n, v in zip(output_names, given)], spec.tolerances, cast=cast)
    outputs = tuple(
        TensorOutput(
            name=name,
            dtype=dtype_name(value.dtype),
            shape=tuple(symbols.size(size) for size in value.shape),
            tolerance=tolerance,
        )
        for name, value, tolerance in zip(output_names, given, tolerances)
    )
    return Call(
        parameters=bound.parameters,
        inputs=inputs,
        result=output,
        outputs=outputs,
        dimensions=tuple(symbols.dimensions),
    )


def _tensors(values: dict[str, Any], arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Those of a signature's arguments that are tensors. Not by name alone: the text "relu" may be a constant."""
    return [values[argument.name] for argument in arguments if isinstance(argument, TensorArgument)]


def _input_shape(name: str, value: torch.Tensor, symbols: Symbols) -> tuple[Any, ...]:
    shape = tuple(symbols.size(size) for size in value.shape)
    if None in shape:
        raise ExportError(f"{name} was traced as {list(value.shape)}, which has a size of several dimensions")
    return shape


def _refuse_mutation(program: torch.export.ExportedProgram) -> None:
    signature = program.graph_signature
    if _may_mutate(program):
        with warnings.catch_warnings():
            # torch 2.13 copies its own deprecated LeafSpec.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            signature = program.run_decompositions({}).graph_signature
    if buffers := sorted(set(signature.buffers_to_mutate.values())):
        raise ExportError(
            f"the model changes its buffers {', '.join(buffers)} while it runs: every call would depend on the ones "
            "before it, and on which runner served them",
            hint="Pass the state in as an input and return it as an output.",
        )
    if inputs := sorted(set(signature.user_inputs_to_mutate.values())):
        raise ExportError(
            f"the model writes into its inputs {', '.join(inputs)}", hint="Clone them first, or return the new value."
        )


def _may_mutate(program: torch.export.ExportedProgram) -> bool:
    """Whether an operator of the graph writes into an argument; only decomposition shows which one."""
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return any(target._schema.is_mutable for target in targets if isinstance(target, torch._ops.OpOverload))


# --- the model, ready to be asked -------------------------------------------------------------------------------------


@contextmanager
def prepared(spec: ExportSpec, device: torch.device, dtype: torch.dtype | None) -> Iterator[ExportSpec]:
    """The spec with its model in eval mode, and model and example inputs on a device and in a dtype.

    The caller's model is left as it was: it is copied where it has to move.
    """
    bound = describe_call(spec.model, spec.example_inputs, spec.example_kwargs)
    tensors = tuple(_place(tensor, device, dtype) for tensor in bound.tensors)
    args, kwargs = bound.with_tensors(tensors)
    state = [*spec.model.parameters(), *spec.model.buffers()]
    moves = any(t.device != device or (dtype and t.is_floating_point() and t.dtype != dtype) for t in state)
    model = copy.deepcopy(spec.model).to(device=device, dtype=dtype) if moves else spec.model
    training = [module for module in model.modules() if module.training]
    try:
        yield replace(spec, model=model.eval(), example_inputs=args, example_kwargs=kwargs)
    finally:
        for module in training:
            module.training = True


def on_device(bound: BoundCall, device: torch.device) -> BoundCall:
    """The same call with its tensors on a device."""
    tensors = tuple(tensor.to(device) for tensor in bound.tensors)
    args, kwargs = bound.with_tensors(tensors)
    return replace(bound, args=args, kwargs=kwargs, tensors=tensors)


def _place(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    # Compiled code is made for the strides it is traced with, and callers are held to contiguous inputs.
    return tensor.detach().to(device=device, dtype=cast).contiguous()


_EXPORT_ELSEWHERE = (
    "CUDA code is compiled on a machine that has the GPU: `exportkit export --format program` here, and "
    "`exportkit export PROGRAM.pt2 --device cuda` there."
)


class _ParsedDevice(msgspec.Struct):
    kind: str
    index: int | None


def usable_device(name: str, without_cuda: str = _EXPORT_ELSEWHERE) -> torch.device:
    """The device of this name, which means what it means to `exportkit.load`.

    Args:
        name: `cpu`, `cuda` or `cuda:<index>`.
        without_cuda: What to do where there is no CUDA.

    Raises:
        UsageError: It is none of these.
        HostError: This machine has no such device.
    """
    device = msgspec.json.decode(core.text("ek_parse_device", core.encoded(name)), type=_ParsedDevice)
    if device.kind == "auto":
        raise UsageError("device 'auto' is not known here", hint="Give cpu, cuda or cuda:<index>.")
    if device.kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = (
            f"this torch ({torch.__version__}) has no CUDA" if torch.version.cuda is None else "there is no CUDA device"
        )
        raise HostError(f"cannot use {name}: {why}", hint=without_cuda)
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise HostError(f"there is no {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def parse_floating(name: str | None) -> torch.dtype | None:
    """The dtype to cast to.

    Raises:
        UsageError: It is no floating dtype.
    """
    if name is None:
        return None
    dtype = getattr(torch, name, None) if name in ("float16", "bfloat16", "float32", "float64") else None
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"cannot cast a model to {name}", hint="Give float16, bfloat16, float32 or float64.")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


def package_name(model: torch.nn.Module) -> str:
    """What a package is called when nobody says: the model's class."""
    return type(model).__name__.strip("_") or "model"


def provenance() -> Provenance:
    """Where an artifact comes from: versions, and the commit of the working directory."""
    commit = _git("rev-parse", "HEAD")
    dirty = bool(_git("status", "--porcelain", "--untracked-files=no")) if commit else None
    return Provenance(exportkit=__version__, torch=str(torch.__version__), commit=commit, dirty=dirty, tf32=False)


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *args],
            cwd=Path.cwd(),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
