"""The eager process: makes the model from its current source and runs it at given sizes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exportkit.child.forked import in_fork
from exportkit.child.messages import serve
from exportkit.verify.commands import (
    CallsDrawn,
    CompareGradients,
    DrawCalls,
    EagerMade,
    GradientsCompared,
    MakeEager,
)

if TYPE_CHECKING:
    from exportkit.export.record.sequences import DrawnCall

_SECONDS = 60  # for a call with values out of range


class Eager:
    """The eager model, with the dtype of the export, on the given device."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._eager: Any = None
        self._described: Any = None
        self._command: Any = None
        self._device: Any = None

    def make(self, command: MakeEager) -> EagerMade:
        """Makes MODEL from its name, arguments and seed."""
        from exportkit.export.models.eager_model import rebuild_eager
        from exportkit.export.models.placement import usable_device
        from exportkit.export.record.cases import state_sha256
        from exportkit.export.record.eager_methods import DescribedModel, EagerMethods

        self._command, self._device = command, usable_device(command.device)
        model = rebuild_eager(command.eager.source(), command.source, command.methods, command.state, self._device)
        spec = self._stack.enter_context(model)
        self._eager = EagerMethods(spec)
        self._described = DescribedModel(self._eager, command.methods, command.state, self._device, command.tf32)
        return EagerMade(state_sha256(spec.model, spec.state))

    def draw(self, command: DrawCalls) -> CallsDrawn:
        """Draws calls, makes them, and writes what a case has of them to a file."""
        import msgspec
        from safetensors.torch import save_file

        from exportkit.export.record.eager_run import run_eagerly
        from exportkit.export.record.record import record_run
        from exportkit.export.record.sequences import draw_call, draw_session
        from exportkit.package.manifest import Case, CaseCall

        if command.method is None:
            calls = draw_session(self._described, command.sizes, command.seed)
        else:
            method = next(each for each in self._command.methods if each.name == command.method)
            calls = [draw_call(self._eager, method, command.sizes, command.seed)]
        if command.kinds:
            call = self._out_of_range(calls[0], command)
            case = Case(record="", calls=(CaseCall(call.method, command.sizes),))
            refused = in_fork(lambda: self._outcome([call]), seconds=_SECONDS) == b"refused"
            if refused:
                tensors = {f"0.input.{place}": tensor.cpu() for place, tensor in enumerate(call.bound.tensors)}
                save_file(tensors, command.file)
            return CallsDrawn(case, (), refused)
        recorded = record_run(run_eagerly(self._described, calls))
        Path(command.file).write_bytes(recorded.tensors)
        structures = tuple(msgspec.json.encode(node).decode() for node in recorded.structures)
        case = Case(record="", calls=recorded.calls, reference_dtype=recorded.reference_dtype)
        return CallsDrawn(case, structures)

    def _outcome(self, calls: Sequence[DrawnCall]) -> bytes:
        """Returns whether eager refuses calls, in a process of their own: a kernel may read what is not its."""
        import torch

        from exportkit.errors import ExportError, UsageError
        from exportkit.export.record.eager_run import run_eagerly

        torch.set_num_threads(1)
        try:
            run_eagerly(self._described, calls)
        except (ExportError, UsageError):
            return b"refused"
        return b"answered"

    def _out_of_range(self, call: DrawnCall, command: DrawCalls) -> DrawnCall:
        """Returns a call with the values out of range that a command asks for."""
        import torch

        from exportkit.export.record.edge_values import with_edge_values

        generator = torch.Generator().manual_seed(command.seed)
        tensors = tuple(
            with_edge_values(command.kinds[name], tensor, generator) if name in command.kinds else tensor
            for name, tensor in zip(call.bound.names, call.bound.tensors)
        )
        return replace(call, bound=self._eager.bind(call.method, *call.bound.with_tensors(tensors)))

    def compare(self, command: CompareGradients) -> GradientsCompared:
        """Compares gradients with differences, in the widest dtype that the model can be computed in."""
        from exportkit.export.models.placement import on_device
        from exportkit.export.record.reference import wide_calls
        from exportkit.export.record.sequences import draw_call
        from exportkit.precision import with_tf32
        from exportkit.verify.gradient_checks import gradient_findings

        method = next(each for each in self._command.methods if each.name == command.method)
        drawn = draw_call(self._eager, method, command.sizes, command.seed)
        bound = on_device(drawn.bound, self._device)
        with with_tf32(False):
            wide = wide_calls(self._eager.specs[method.name].model, bound)
            if wide is None:
                return GradientsCompared(())
            answers, inputs, precision = wide
            found = gradient_findings(
                method.call,
                inputs,
                lambda calls: [answers(tensors) for tensors in calls],
                seed=command.seed,
                precision=precision,
            )
        return GradientsCompared(tuple(found))


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    with ExitStack() as stack:
        eager = Eager(stack)
        serve(connection, {MakeEager: eager.make, DrawCalls: eager.draw, CompareGradients: eager.compare})
