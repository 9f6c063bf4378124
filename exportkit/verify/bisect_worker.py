"""The process that cuts a graph. It has the eager model, or the program, and compiles what is left of the graph."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from exportkit.child.messages import serve
from exportkit.child.offline import go_offline
from exportkit.errors import UsageError
from exportkit.export.artifact import write_compiled, write_program
from exportkit.export.compile.compile_plan import CompilePlan
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.call_signature import BoundCall, describe_call
from exportkit.export.models.placement import on_device, usable_device
from exportkit.export.models.resolved import EagerModel
from exportkit.export.models.source_lines import where_traced
from exportkit.export.programs.cut_program import (
    cut_after,
    cut_call,
    cut_points,
    own_values,
    values_after,
)
from exportkit.export.programs.cut_state import call_with_state, state_before, used_by, written_state
from exportkit.export.programs.eager_model import rebuild_eager
from exportkit.export.programs.program_file import load_extracted
from exportkit.export.programs.reproduction import reproduction, reproduction_source, values_of
from exportkit.export.record.cases import state_sha256
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.record.record import record_case
from exportkit.export.record.sequences import DrawnCall, draw_call, draw_session
from exportkit.export.trace.lifted import STATE
from exportkit.export.trace.preflight import describe_operators, graph_operators
from exportkit.export.trace.trace import ready_to_trace
from exportkit.export.trace.trace_method import trace_with_torch_export
from exportkit.export.trace.traced import Traced, TracedMethod
from exportkit.package.manifest import Call, Manifest, PackagedMethod, Size, decode_checked
from exportkit.reference_model import ReferenceModel
from exportkit.sizes import sizes_of
from exportkit.spec import FORWARD, ExportSpec
from exportkit.verify.bisect_commands import (
    CallInputs,
    CutGraph,
    CutPoint,
    GraphCut,
    GraphRead,
    ReadGraph,
    ReproductionWritten,
    WriteReproduction,
)


class Cutter:
    """The graph of a method, and the model that it was traced from or that it is."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._command: ReadGraph
        self._manifest: Manifest
        self._device: torch.device
        self._eager: EagerMethods
        self._program: torch.export.ExportedProgram

    def read(self, command: ReadGraph) -> GraphRead:
        """Traces the model, or reads the program. From then on, this process has no network."""
        self._command, self._manifest = command, decode_checked(command.manifest.encode())
        self._device = usable_device(command.device)
        eager = command.eager.source()
        if command.program is not None:
            files = {command.method: Path(command.program)}
            alone = replace(self._manifest, methods=(self._method,), state=())
            saved = load_extracted(files, alone, eager.op_libraries)
            self._eager, self._program = EagerMethods(saved.spec), saved.programs[command.method]
        else:
            self._trace(eager)
        points = cut_points(self._program)
        go_offline()
        return GraphRead(tuple(_described(node) for node in points))

    @property
    def _method(self) -> PackagedMethod:
        return self._manifest.method(self._command.method)

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
        options = TraceOptions(self._command.device, dynamic=dynamic, tf32=manifest.provenance.tf32)
        with ready_to_trace(EagerModel(spec), options, self._device) as ready:
            self._program, *_ = trace_with_torch_export(*ready.tasks[self._command.method])

    def cut(self, command: CutGraph) -> GraphCut:
        """Writes an artifact that computes the graph up to a node, with one case."""
        point = cut_points(self._program)[command.point]
        program, values = cut_after(self._program, point), values_after(self._program, point)
        manifest = self._manifest
        call = cut_call(call_with_state(self._method, manifest), manifest.source, values)
        method = TracedMethod(FORWARD, program, call)
        bound = self._bound(command.call)
        # The same function as before the cut, node by node as eager computes it.
        writes = [*self._eager.entries[self._method.name].writes, *written_state(self._method)]
        spec = ExportSpec(program.module(check_guards=False), bound.args, bound.kwargs, writes=writes)
        drawn = DrawnCall(FORWARD, bound, sizes_of(call.inputs, [tensor.shape for tensor in bound.tensors]))
        case = record_case(EagerMethods(spec), (method.packaged,), (), [drawn], tf32=manifest.provenance.tf32)
        traced = Traced(
            methods=(method,),
            operators=describe_operators(graph_operators(program.graph_module)),
            cases=(case,),
            source=manifest.source,
            provenance=manifest.provenance,
            name="cut",
        )
        self._write(traced, command)
        return GraphCut(sum(tensor.numel() * tensor.element_size() for tensor in bound.tensors))

    def reproduce(self, command: WriteReproduction) -> ReproductionWritten:
        """Writes a part of the graph as a Python file that needs torch alone."""
        point = cut_points(self._program)[command.point]
        by_name = {node.name: node for node in self._program.graph.nodes}
        # What differs may be what is written into an input, which is no value of the graph.
        wrong = [name for name in command.results if name in by_name]
        results = [by_name[name] for name in wrong or own_values(point)]
        tensors = [node for node in results if isinstance(node.meta.get("val"), torch.Tensor)]
        values = values_of(self._program, self._bound(command.call).tensors)
        found = reproduction(tensors, values, command.depth)
        source = reproduction_source(
            found,
            command.inductor_config,
            dynamic=bool(self._method.call.dimensions),
            title=f"torch.compile and eager differ at {point.target}.",
        )
        Path(command.output).write_text(source)
        return ReproductionWritten(len(found.nodes), found.drawn)

    def _bound(self, command: CallInputs) -> BoundCall:
        """Returns a call of the graph, on its device: that of the method, and the state before it."""
        bound, before = self._calls(command)
        bound = on_device(bound, self._device)
        if not self._method.state:
            return bound
        tf32 = self._manifest.provenance.tf32
        state = state_before(self._eager, before, command.session_sizes, self._device, tf32=tf32)
        taken = tuple(state[tensor.name] for tensor in used_by(self._method, self._manifest))
        return describe_call(self._program.module(check_guards=False), bound.args, {**bound.kwargs, STATE: taken})

    def _calls(self, command: CallInputs) -> tuple[BoundCall, list[DrawnCall]]:
        """Returns the call that differs, and those before it in its session."""
        method = self._method
        if command.inputs is not None:
            tensors = load_file(command.inputs)
            before = [
                DrawnCall(name, self._recorded(tensors, number, name), {}) for number, name in enumerate(command.before)
            ]
            return self._recorded(tensors, command.number, method.name), before if method.state else []
        if not method.state:
            return draw_call(self._eager, method, command.sizes, command.seed).bound, []
        drawn = draw_session(self._eager, self._manifest.methods, command.sizes, command.seed)
        if drawn[command.number].method != method.name:
            raise UsageError(
                f"call {command.number} of the session is of {drawn[command.number].method}, not of {method.name}",
                hint="A bisection of a recorded case knows the methods: verify with `--against cases`.",
            )
        return drawn[command.number].bound, drawn[: command.number]

    def _recorded(self, tensors: Mapping[str, torch.Tensor], number: int, name: str) -> BoundCall:
        entry, count = self._eager.entries[name], len(self._manifest.method(name).call.inputs)
        example = describe_call(entry.model, entry.example_inputs, entry.example_kwargs)
        args, kwargs = example.with_tensors(tuple(tensors[f"{number}.input.{i}"] for i in range(count)))
        return describe_call(entry.model, args, kwargs)

    def _write(self, traced: Traced, command: CutGraph) -> None:
        out, read = Path(command.output), self._command
        if not read.compiled:
            write_program(traced, out, device=self._device, version="0")
            return
        plan = CompilePlan(
            self._device,
            (read.cpu_isa,),
            inductor_config=command.inductor_config,
            embed_weights=read.embed_weights,
            eager_kernels=command.eager_kernels,
        )
        write_compiled(traced, out, plan, version="0")


def _described(node: torch.fx.Node) -> CutPoint:
    return CutPoint(node.name, str(node.target), where_traced(node), own_values(node))


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
        serve(connection, {ReadGraph: cutter.read, CutGraph: cutter.cut, WriteReproduction: cutter.reproduce})
