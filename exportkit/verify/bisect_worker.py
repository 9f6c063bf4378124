"""The process that cuts a graph. It has the eager model, or the program, and compiles what is left of the graph."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file

from exportkit.child.messages import serve
from exportkit.eager_source import EagerSource
from exportkit.errors import UsageError
from exportkit.export.aot_inductor import CompilePlan
from exportkit.export.artifact import write_compiled, write_program
from exportkit.export.call_signature import BoundCall, describe_call
from exportkit.export.cases import draw_inputs, record_case, state_sha256
from exportkit.export.cut_program import cut_after, cut_call, cut_points, own_values, values_after
from exportkit.export.eager_model import rebuild_eager
from exportkit.export.export_options import TraceOptions
from exportkit.export.placement import on_device, usable_device
from exportkit.export.preflight import describe_operators, graph_operators
from exportkit.export.program_file import load_extracted
from exportkit.export.resolved import EagerModel
from exportkit.export.source_lines import where_traced
from exportkit.export.tolerances import accuracy_outputs
from exportkit.export.trace import Traced, ready_to_trace, trace_with_torch_export
from exportkit.package.manifest import Call, Manifest, Size, decode_checked
from exportkit.spec import ExportSpec
from exportkit.verify.bisect_commands import CutGraph, CutPoint, GraphCut, GraphRead, ReadGraph


class Cutter:
    """A graph, and the model that it was traced from or that it is."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._command: ReadGraph
        self._manifest: Manifest
        self._device: torch.device
        self._spec: ExportSpec
        self._program: torch.export.ExportedProgram

    def read(self, command: ReadGraph) -> GraphRead:
        """Traces the model, or reads the program."""
        self._command, self._manifest = command, decode_checked(command.manifest.encode())
        self._device = usable_device(command.device)
        eager = command.eager.source()
        if command.program is not None:
            saved = load_extracted(Path(command.program), self._manifest, eager.op_libraries)
            self._spec, self._program = saved.spec, saved.program
        else:
            self._trace(eager)
        points = cut_points(self._program)
        return GraphRead(tuple(_described(node) for node in points))

    def _trace(self, eager: EagerSource) -> None:
        source, call = self._manifest.source, self._manifest.call
        self._spec = self._stack.enter_context(rebuild_eager(eager, source, call, self._device))
        if (found := state_sha256(self._spec.model)) != source.state_sha256:
            raise UsageError(
                f"{eager.model} has another state (sha256 {found}) than the artifact's model ({source.state_sha256})",
                hint="Its source may have changed since the export, or --weights is missing.",
            )
        options = TraceOptions(self._command.device, dynamic=dynamic_texts(call), tf32=self._manifest.provenance.tf32)
        with ready_to_trace(EagerModel(self._spec), options, self._device) as (task, sizes):
            self._program = trace_with_torch_export(task.spec, task.bound, sizes)

    def cut(self, command: CutGraph) -> GraphCut:
        """Writes an artifact that computes the graph up to a node, with one case."""
        point = cut_points(self._program)[command.point]
        program, values = cut_after(self._program, point), values_after(self._program, point)
        manifest = self._manifest
        call = cut_call(manifest.call, manifest.source, values)
        bound = on_device(self._inputs(command), self._device)
        # The same function as before the cut, node by node as eager computes it.
        case = record_case(
            program.module(check_guards=False),
            bound,
            command.sizes,
            call.outputs,
            accuracy_outputs(call.outputs, {}),
            tf32=manifest.provenance.tf32,
        )
        traced = Traced(
            program=program,
            call=call,
            operators=describe_operators(graph_operators(program.graph_module)),
            cases=(case,),
            source=manifest.source,
            provenance=manifest.provenance,
            name="cut",
        )
        self._write(traced, Path(command.output))
        return GraphCut(sum(tensor.numel() * tensor.element_size() for tensor in bound.tensors))

    def _inputs(self, command: CutGraph) -> BoundCall:
        spec, call = self._spec, self._manifest.call
        if command.inputs is None:
            return describe_call(spec.model, *draw_inputs(spec, call, command.sizes, command.seed))
        tensors = load_file(command.inputs)
        example = describe_call(spec.model, spec.example_inputs, spec.example_kwargs)
        args, kwargs = example.with_tensors(tuple(tensors[f"input.{index}"] for index in range(len(call.inputs))))
        return describe_call(spec.model, args, kwargs)

    def _write(self, traced: Traced, out: Path) -> None:
        name = self._command.target
        if name is None:
            write_program(traced, out, device=self._device, version="0")
            return
        target = next(target for target in self._manifest.targets if target.name == name)
        plan = CompilePlan(self._device, (target.cpu_isa,), embed_weights=not self._manifest.weights)
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
        serve(connection, {ReadGraph: cutter.read, CutGraph: cutter.cut})
