"""The process that cuts a graph. It has the eager model, or the program, and compiles what is left of the graph."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from exportkit.child.messages import serve
from exportkit.child.offline import go_offline
from exportkit.errors import UsageError
from exportkit.export.artifact import write_compiled, write_program
from exportkit.export.compile.compile_plan import CompilePlan
from exportkit.export.compile.eager_kernels import has_kernel
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.call_signature import BoundCall, describe_call
from exportkit.export.models.eager_model import rebuild_eager
from exportkit.export.models.placement import on_device, usable_device
from exportkit.export.models.program_file import load_extracted
from exportkit.export.models.program_model import STATE
from exportkit.export.models.resolved import EagerModel
from exportkit.export.models.source_lines import where_traced
from exportkit.export.record.cases import eager_mode, state_sha256
from exportkit.export.record.eager_methods import DescribedModel, EagerMethods
from exportkit.export.record.eager_run import run_eagerly
from exportkit.export.record.record import record_run
from exportkit.export.record.sequences import DrawnCall, draw_call, draw_session
from exportkit.export.trace.preflight import describe_operators, graph_operators
from exportkit.export.trace.trace import ready_to_trace
from exportkit.export.trace.trace_method import trace_with_torch_export
from exportkit.export.trace.traced import Traced, TracedMethod
from exportkit.package.manifest import (
    Call,
    Dimension,
    Manifest,
    PackagedMethod,
    Parameter,
    SequenceNode,
    Size,
    StateTensor,
    Target,
    TensorInput,
    TensorNode,
    decode_checked,
)
from exportkit.reference_model import ReferenceModel
from exportkit.sizes import sizes_of
from exportkit.spec import FORWARD, ExportSpec
from exportkit.verify.bisect_commands import CutGraph, CutPoint, FailedCall, GraphCut, GraphRead, ReadGraph
from exportkit.verify.cut_program import (
    cut_after,
    cut_call,
    cut_points,
    own_values,
    values_after,
)
from exportkit.verify.eager_decisions import EagerDecisions


class Cutter:
    """The graph of a method, and the model that it was traced from or that it is."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._command: ReadGraph
        self._manifest: Manifest
        self._method: PackagedMethod
        self._target: Target | None
        self._device: torch.device
        self._eager: EagerMethods
        self._program: torch.export.ExportedProgram
        self._decisions: EagerDecisions

    def read(self, command: ReadGraph) -> GraphRead:
        """Traces the model, or reads the program. From then on, this process has no network."""
        manifest = decode_checked(command.manifest.encode())
        self._command, self._manifest, self._method = command, manifest, manifest.method(command.call.method)
        self._target = next((target for target in manifest.targets if target.name == command.target), None)
        by_program = manifest.program.device if manifest.program else "cpu"
        self._device = usable_device(self._target.device if self._target else by_program)
        eager = command.eager.source()
        if command.program is not None:
            name = self._method.name
            alone = replace(manifest, methods=(self._method,), state=())
            saved = load_extracted({name: Path(command.program)}, alone, eager.op_libraries)
            self._eager, self._program = EagerMethods(saved.spec), saved.programs[name]
        else:
            self._trace(eager)
        self._decisions = EagerDecisions(self._program)
        self._program = self._decisions.program
        points = cut_points(self._program)
        if not points:
            raise UsageError("the graph has no node, so that there is nothing to cut")
        go_offline()
        return GraphRead(tuple(_described(node) for node in points))

    def _trace(self, eager: ReferenceModel) -> None:
        manifest, source = self._manifest, self._manifest.source
        made = rebuild_eager(eager, source, manifest.methods, manifest.state, self._device)
        spec = self._stack.enter_context(made)
        self._eager = EagerMethods(spec)
        if (found := state_sha256(spec.model, spec.state)) != source.state_sha256:
            raise UsageError(
                f"{eager.model} has another state (sha256 {found}) than the artifact's model ({source.state_sha256})",
                hint="Its source may have changed since the export, or --weights is missing.",
            )
        # What --dynamic said of the only method, it said on the command line. Several have it in their spec.
        dynamic = dynamic_texts(self._method.call) if len(manifest.methods) == 1 else ()
        options = TraceOptions(self._device.type, dynamic=dynamic, tf32=manifest.provenance.tf32)
        with ready_to_trace(EagerModel(spec), options, self._device) as (_, tasks):
            self._program, *_ = trace_with_torch_export(*tasks[self._method.name])

    def cut(self, command: CutGraph) -> GraphCut:
        """Writes an artifact that computes the graph up to a node, with one case."""
        point = cut_points(self._program)[command.point]
        program, values = cut_after(self._program, point), values_after(self._program, point)
        manifest = self._manifest
        bound = self._bound()
        taken = self._decisions.describe(call_with_state(self._method, manifest), bound)
        call = cut_call(taken, manifest.source, values)
        method = TracedMethod(FORWARD, program, call)
        # The same function as before the cut, node by node as eager computes it.
        writes = [*self._eager.specs[self._method.name].writes, *written_state(self._method)]
        spec = ExportSpec(program.module(check_guards=False), bound.args, bound.kwargs, writes=writes)
        drawn = DrawnCall(FORWARD, bound, sizes_of(call.inputs, [tensor.shape for tensor in bound.tensors]))
        tf32 = manifest.provenance.tf32
        model = DescribedModel(EagerMethods(spec), (method.packaged,), (), self._device, tf32)
        case = record_run(run_eagerly(model, [drawn]))
        traced = Traced(
            methods=(method,),
            operators=describe_operators(graph_operators(program.graph_module)),
            cases=(case,),
            source=manifest.source,
            provenance=manifest.provenance,
            name="cut",
        )
        self._write(traced, Path(command.output))
        return GraphCut()

    def _bound(self) -> BoundCall:
        """Returns the call that fails, of the graph on its device: that of the method, and the state before it."""
        bound, before = self._calls(self._command.call)
        bound = on_device(bound, self._device)
        if not self._method.state:
            return self._decisions.bind(bound)
        sizes, tf32 = self._command.call.session_sizes, self._manifest.provenance.tf32
        state = state_before(self._eager, before, sizes, self._device, tf32=tf32)
        taken = tuple(state[tensor.name] for tensor in used_by(self._method, self._manifest))
        whole = self._decisions.original.module(check_guards=False)
        return self._decisions.bind(describe_call(whole, bound.args, {**bound.kwargs, STATE: taken}))

    def _calls(self, call: FailedCall) -> tuple[BoundCall, list[DrawnCall]]:
        """Returns the call that fails, and those before it in its session."""
        method = self._method
        if call.inputs is not None:
            tensors = load_file(call.inputs)
            methods = call.before if method.state else ()
            before = [DrawnCall(name, self._recorded(tensors, i, name), {}) for i, name in enumerate(methods)]
            return self._recorded(tensors, call.number, method.name), before
        if not method.state:
            return draw_call(self._eager, method, call.sizes, call.seed).bound, []
        drawn = draw_session(DescribedModel(self._eager, self._manifest.methods), call.sizes, call.seed)
        if drawn[call.number].method != method.name:
            raise UsageError(
                f"call {call.number} of the session is of {drawn[call.number].method}, not of {method.name}",
                hint="A bisection of a recorded case knows the methods: verify with `--against cases`.",
            )
        return drawn[call.number].bound, drawn[: call.number]

    def _recorded(self, tensors: Mapping[str, torch.Tensor], number: int, name: str) -> BoundCall:
        entry, count = self._eager.specs[name], len(self._manifest.method(name).call.inputs)
        example = describe_call(entry.model, entry.example_inputs, entry.example_kwargs)
        args, kwargs = example.with_tensors(tuple(tensors[f"{number}.input.{i}"] for i in range(count)))
        return describe_call(entry.model, args, kwargs)

    def _write(self, traced: Traced, out: Path) -> None:
        if self._target is None:
            write_program(traced, out, device=self._device, version="0")
            return
        given = self._command.given
        plan = CompilePlan(
            device=self._device,
            cpu_isas=(self._target.cpu_isa,),
            cuda_arch="native",
            inductor_config=given.inductor_config,
            embed_weights=not self._manifest.weights,
            eager_kernels=given.eager_kernels,
            cache=False,
        )
        write_compiled(traced, out, plan, version="0")


def _described(node: torch.fx.Node) -> CutPoint:
    return CutPoint(node.name, str(node.target), where_traced(node), own_values(node), _place(node))


def _place(node: torch.fx.Node) -> str:
    """Returns what leaves a node to eager's kernel: of a view or a conversion, which has none, what it is made from."""
    while not has_kernel(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return f"{node.target}@{node.name}" if has_kernel(node.target) else ""


def dynamic_texts(call: Call) -> list[str]:
    """Returns what --dynamic says of the inputs of a call."""
    ranges = {dimension.name: f"[{dimension.min}:{dimension.max}]" for dimension in call.dimensions}
    return [
        f"{tensor.name}:{place}=" + (f"{size}{ranges[size.dimension]}" if isinstance(size, Size) else str(size))
        for tensor in call.inputs
        for place, size in enumerate(tensor.shape)
    ]


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    with ExitStack() as stack:
        cutter = Cutter(stack)
        serve(connection, {ReadGraph: cutter.read, CutGraph: cutter.cut})


# --- state as inputs: a cut computes one call -------------------------------------------------------------------------


def used_by(method: PackagedMethod, manifest: Manifest) -> list[StateTensor]:
    """Returns the state that a method's program takes, in its order."""
    return [manifest.state[use.index] for use in method.state]


def call_with_state(method: PackagedMethod, manifest: Manifest) -> Call:
    """Describes the call of a method's program, whose state is an input like others. What it writes is a result."""
    call, state = method.call, used_by(method, manifest)
    if not state:
        return call
    count = len(call.inputs)
    inputs = tuple(
        TensorInput(
            name=f"{STATE}.{position}",
            dtype=tensor.dtype,
            shape=tensor.shape,
            written=tensor.tolerance if use.written else None,
        )
        for position, (use, tensor) in enumerate(zip(method.state, state))
    )
    items = tuple(TensorNode(index=count + position) for position in range(len(inputs)))
    taken = Parameter(name=STATE, kind="keyword", value=SequenceNode(kind="tuple", items=items))
    known = {dimension.name for dimension in call.dimensions}
    sizes = {size.dimension for tensor in state for size in tensor.shape if isinstance(size, Size)}
    others = {each.name: each for other in manifest.methods for each in other.call.dimensions}
    more: list[Dimension] = [others[name] for name in sorted(sizes - known)]
    return msgspec.structs.replace(
        call,
        parameters=(*call.parameters, taken),
        inputs=(*call.inputs, *inputs),
        dimensions=(*call.dimensions, *more),
    )


def written_state(method: PackagedMethod) -> list[str]:
    """Returns the inputs of `call_with_state` that are state and are written."""
    return [f"{STATE}.{position}" for position, use in enumerate(method.state) if use.written]


def state_before(
    eager: EagerMethods, calls: Sequence[DrawnCall], sizes: Mapping[str, int], device: torch.device, *, tf32: bool
) -> dict[str, torch.Tensor]:
    """Returns eager's state after some calls, by name."""
    dimensions = {buffer.dimension for buffer in eager.buffers}
    session = eager.session({name: size for name, size in sizes.items() if name in dimensions})
    with eager_mode(tf32=tf32):
        for call in calls:
            session.call(call.method, on_device(call.bound, device))
    return {name: tensor.clone() for name, tensor in session.state.items()}
