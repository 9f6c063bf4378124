"""The eager process: makes the model from its current source and runs it at given sizes."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

from exportkit.child.messages import serve
from exportkit.verify.commands import DrawInputs, EagerMade, InputsDrawn, MakeEager


class Eager:
    """The eager model, with the dtype of the export, on the given device."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._spec: Any = None
        self._call: Any = None
        self._device: Any = None
        self._tf32 = False

    def make(self, command: MakeEager) -> EagerMade:
        """Makes MODEL from its name, arguments and seed."""
        from exportkit.export.cases import state_sha256
        from exportkit.export.eager_model import rebuild_eager
        from exportkit.export.placement import usable_device

        self._call, self._tf32 = command.call, command.tf32
        self._device = usable_device(command.device)
        model = rebuild_eager(command.eager.source(), command.source, command.call, self._device)
        self._spec = self._stack.enter_context(model)
        return EagerMade(state_sha256(self._spec.model))

    def draw(self, command: DrawInputs) -> InputsDrawn:
        """Draws inputs, calls the model, and writes inputs and outputs to files."""
        import msgspec
        from safetensors.torch import save_file

        from exportkit.export.call_signature import describe_call, is_tensor
        from exportkit.export.cases import draw_inputs, eager_mode
        from exportkit.export.placement import on_device
        from exportkit.export.reference import references
        from exportkit.export.tolerances import accuracy_outputs
        from exportkit.package.case_files import named_references, named_tensors
        from exportkit.package.structure import flatten

        model = self._spec.model
        bound = describe_call(model, *draw_inputs(self._spec, self._call, command.sizes, command.seed))
        # Saved before the call: a model may write into its inputs.
        save_file(named_tensors("input", bound.tensors), command.inputs)
        bound = on_device(bound, self._device)
        args, kwargs = bound.with_tensors(tuple(tensor.clone() for tensor in bound.tensors))
        with eager_mode(tf32=self._tf32):
            result = model(*args, **kwargs)
        node, leaves = flatten(result, is_tensor, where="the model's output")
        outputs = self._call.outputs
        wanted = accuracy_outputs(outputs, self._spec.tolerances) if len(leaves) == len(outputs) else ()
        with eager_mode():
            known = references(model, bound, leaves, outputs, wanted, tf32=self._tf32)
        tensors = named_references(outputs, known.outputs) if known else {}
        save_file(named_tensors("output", leaves) | tensors, command.outputs)
        return InputsDrawn(msgspec.json.encode(node).decode())


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    with ExitStack() as stack:
        eager = Eager(stack)
        serve(connection, {MakeEager: eager.make, DrawInputs: eager.draw})
