"""Makes the decisions of a graph its inputs, so that code is compared along the decisions that eager takes.

A threshold, an argmax or a routing decides by values that may be at the border. Right code may decide otherwise there,
and then all that follows differs. Given eager's decisions, what follows is comparable again, and what a decision itself
computes is a result like others.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import msgspec
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from exportkit.export.models.call_signature import BoundCall, describe_call
from exportkit.export.models.program_model import called_signature, rebuilt
from exportkit.export.record.cases import eager_mode
from exportkit.package.manifest import Call, Parameter, SequenceNode, TensorInput, TensorNode
from exportkit.verify.cut_program import DECISION, computing, cut_points, own_values

_TAKEN = "exportkit_decisions"  # the keyword argument of a program that takes decisions, a tuple of tensors


class EagerDecisions:
    """The decisions of a program.

    Attributes:
        original: The program.
        program: The same, which takes them as inputs. What they were computed by is still there.
    """

    def __init__(self, program: ExportedProgram) -> None:
        """Finds them: whole numbers and truths that are computed from floating values."""
        self.original = program
        self._nodes = list(_decisions(program))
        self.program = self._taking() if self._nodes else program

    def bind(self, bound: BoundCall) -> BoundCall:
        """Returns a call of the original program as a call of this one, with the decisions that eager takes in it."""
        if not self._nodes:
            return bound
        taken = self._taken(bound.args, dict(bound.kwargs))
        return describe_call(self.program.module(check_guards=False), bound.args, {**bound.kwargs, _TAKEN: taken})

    def describe(self, call: Call, bound: BoundCall) -> Call:
        """Adds them to the description of a call. They have the sizes of this call."""
        if not self._nodes:
            return call
        count = len(call.inputs)
        taken = zip(bound.names[count:], bound.tensors[count:])
        inputs = tuple(
            TensorInput(name=name, dtype=str(each.dtype).removeprefix("torch."), shape=tuple(each.shape), written=None)
            for name, each in taken
        )
        items = tuple(TensorNode(index=count + place) for place in range(len(inputs)))
        parameter = Parameter(name=_TAKEN, kind="keyword", value=SequenceNode(kind="tuple", items=items))
        parameters = (*call.parameters, parameter)
        return msgspec.structs.replace(call, parameters=parameters, inputs=(*call.inputs, *inputs))

    def _taken(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[torch.Tensor, ...]:
        names = [node.name for node in self._nodes]
        with torch.no_grad(), eager_mode():
            found = computing(self.original, self._nodes).module(check_guards=False)(*args, **kwargs)
        return tuple(found[name].clone() for name in names)

    def _taking(self) -> ExportedProgram:
        program = self.original
        module = copy.deepcopy(program.graph_module)
        by_name = {node.name: node for node in module.graph.nodes}
        last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
        specs = []
        for number, node in enumerate(by_name[each.name] for each in self._nodes):
            with module.graph.inserting_after(last):
                last = module.graph.placeholder(f"{_TAKEN}_{number}")
            last.meta["val"] = node.meta["val"]
            node.meta[DECISION] = True
            node.replace_all_uses_with(last, delete_user_cb=lambda user: user.op != "output")
            specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(name=last.name), None))
        module.recompile()
        signature = dataclasses.replace(
            program.graph_signature, input_specs=[*program.graph_signature.input_specs, *specs]
        )
        called = called_signature(program)
        args, kwargs = tree_unflatten([0] * called.in_spec.num_leaves, called.in_spec)
        structure, names = tree_structure((args, {**kwargs, _TAKEN: (0,) * len(specs)})), called.forward_arg_names
        args, kwargs = program.example_inputs
        return rebuilt(
            program,
            module,
            signature,
            (args, {**kwargs, _TAKEN: self._taken(args, kwargs)}),
            in_spec=structure,
            forward_arg_names=None if names is None else [*names, _TAKEN],
        )


def _decisions(program: ExportedProgram) -> Iterator[torch.fx.Node]:
    """Yields the values that are whole or true by what floating values are, and that others read."""
    by_name = {node.name: node for node in program.graph.nodes}
    for point in cut_points(program):
        if not any(_floating(node) is True for node in point.all_input_nodes):
            continue
        for node in (by_name[name] for name in own_values(point)):
            read = any(user.op != "output" for user in node.users)
            # A size that depends on values is known where it is computed.
            if read and _floating(node) is False and not free_unbacked_symbols(node.meta["val"]):
                yield node


def _floating(node: torch.fx.Node) -> bool | None:
    """Whether a value is floating or complex; None if it is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return any(_floating_value(each) for each in tree_leaves(value)) or None
    return _floating_value(value)


def _floating_value(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
