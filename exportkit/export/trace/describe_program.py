"""Describes a traced program's call for the manifest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument

from exportkit.errors import ExportError
from exportkit.export.models.call_signature import BoundCall, check_plain, is_tensor, look_into_dataclasses
from exportkit.export.models.program_model import taken
from exportkit.export.record.cases import check_packable
from exportkit.export.record.tolerances import check_gradients, check_rankings, output_tolerances
from exportkit.export.sizes.shapes import DynamicSizes, Symbols
from exportkit.package.manifest import Call, Node, Size, TensorInput, TensorOutput
from exportkit.package.structure import flatten, names
from exportkit.spec import ExportSpec


def describe_output(result: Any) -> Node:
    """Returns the structure of a model's result."""
    look_into_dataclasses(result)
    node, leaves = flatten(result, is_tensor, where="the model's output")
    if not leaves:
        raise ExportError("the model returns no tensor", hint="A compiled model returns at least one.")
    for name, leaf in zip(names(node), leaves):
        check_plain(f"output {name}", leaf)
    return node


def describe_program(
    program: torch.export.ExportedProgram,
    bound: BoundCall,
    sizes: DynamicSizes,
    output: Node,
    spec: ExportSpec,
    *,
    written: Collection[str] = (),
    cast: torch.dtype | None = None,
) -> tuple[Call, tuple[tuple[int | Size, ...], ...]]:
    """Describes a traced program for the manifest.

    What it takes beyond the tensors of the call is state, whose shapes are returned beside the call.
    """
    values = {n.name: n.meta.get("val") for n in program.graph.nodes}
    returned = [s.arg for s in program.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    # Constants are the same in every call. A size or .item() is not, and cannot be returned.
    if varying := [i for i, arg in enumerate(returned) if not isinstance(arg, (TensorArgument, ConstantArgument))]:
        raise ExportError(
            f"output {varying[0]} of {len(returned)} is a number that varies from call to call, such as a size",
            hint="Return it as a tensor, such as torch.scalar_tensor(x.shape[0]), or leave it out.",
        )
    # The text "relu" may be a constant, so names do not do.
    given = [values[argument.name] for argument in returned if isinstance(argument, TensorArgument)]
    output_names, tensors = names(output), taken_tensors(program)
    tensors, state = tensors[: len(bound.tensors)], tensors[len(bound.tensors) :]
    if len(tensors) != len(bound.tensors) or len(given) != len(output_names):
        raise ExportError(
            f"the traced program takes {len(tensors)} tensors and returns {len(given)}; the model takes "
            f"{len(bound.tensors)} and returns {len(output_names)}",
            hint="The model's result must have the same structure for all inputs.",
        )
    for name, value in zip((*bound.names, *output_names), (*tensors, *given)):
        check_packable(name, value.dtype)
    symbols = Symbols(
        [(name, tuple(value.shape)) for name, value in zip(bound.names, tensors)], sizes, program.range_constraints
    )
    results = [(name, value.dtype) for name, value in zip(output_names, given)]
    results += [(f"written.{name}", value.dtype) for name, value in zip(bound.names, tensors) if name in written]
    tolerances = dict(zip((name for name, _ in results), output_tolerances(results, spec.tolerances, cast=cast)))
    inputs = tuple(
        TensorInput(
            name=name,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=_fixed_shape(name, value, symbols),
            written=tolerances[f"written.{name}"] if name in written else None,
        )
        for name, value in zip(bound.names, tensors)
    )
    outputs = tuple(
        TensorOutput(
            name=name,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(symbols.size(size) for size in value.shape),
            tolerance=tolerances[name],
        )
        for name, value in zip(output_names, given)
    )
    check_gradients(inputs, outputs, repeats=not (state or written))
    check_rankings(outputs)
    call = Call(
        parameters=bound.parameters,
        inputs=inputs,
        result=output,
        outputs=outputs,
        dimensions=tuple(symbols.dimensions),
    )
    return call, tuple(_fixed_shape("a state", value, symbols) for value in state)


def taken_tensors(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    """Returns the fake tensors that a program takes from its caller, in order."""
    values = {n.name: n.meta.get("val") for n in program.graph.nodes}
    return [values[name] for name in taken(program)]


def _fixed_shape(name: str, value: torch.Tensor, symbols: Symbols) -> tuple[Any, ...]:
    shape = tuple(symbols.size(size) for size in value.shape)
    if None in shape:
        raise ExportError(f"{name} was traced as {list(value.shape)}, where a size depends on several dimensions")
    return shape
