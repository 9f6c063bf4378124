"""The eager process: the model as its source makes it today, asked for what it answers at given sizes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from exportkit.verify.messages import Draw, Drawn, Resolve, Resolved
from exportkit.verify.protocol import serve


class Eager:
    """The eager model, cast and placed as it was for the export."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._spec: Any = None
        self._call: Any = None
        self._device: Any = None
        self._tf32 = False

    def resolve(self, command: Resolve) -> Resolved:
        """Makes MODEL again, from its name, arguments and seed."""
        from exportkit.export.cases import state_sha256
        from exportkit.export.program import usable_device
        from exportkit.export.remake import remade

        self._call, self._tf32 = command.call, command.tf32
        self._device = usable_device(command.device)
        made = remade(
            command.model,
            command.source,
            command.call,
            self._device,
            weights=Path(command.weights) if command.weights else None,
            op_libraries=[Path(library) for library in command.libraries],
        )
        self._spec = self._stack.enter_context(made)
        return Resolved(state_sha256(self._spec.model))

    def draw(self, command: Draw) -> Drawn:
        """Draws inputs, and writes them and what the model answers."""
        import msgspec
        from safetensors.torch import save_file

        from exportkit.export.cases import draw_inputs, eager_mode
        from exportkit.export.program import on_device
        from exportkit.export.signature import describe_call, is_tensor
        from exportkit.package.case_files import named_tensors
        from exportkit.package.structure import flatten

        model = self._spec.model
        bound = describe_call(model, *draw_inputs(self._spec, self._call, command.sizes, command.seed))
        # Saved before the call: a model may write into its inputs.
        save_file(named_tensors("input", bound.tensors), command.inputs)
        bound = on_device(bound, self._device)
        with eager_mode(tf32=self._tf32):
            result = model(*bound.args, **bound.kwargs)
        node, leaves = flatten(result, is_tensor, where="the model's output")
        save_file(named_tensors("output", leaves), command.outputs)
        return Drawn(msgspec.json.encode(node).decode())


def main() -> None:
    """Entry point of the child."""
    with ExitStack() as stack:
        eager = Eager(stack)
        serve({Resolve: eager.resolve, Draw: eager.draw})


if __name__ == "__main__":
    main()
