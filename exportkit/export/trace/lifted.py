"""Makes arguments of a model's state: a traced program has no memory of its own, and writes into what it is given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure

from exportkit.errors import ExportError
from exportkit.export.models.call_signature import BoundCall, with_forward
from exportkit.export.models.method_specs import written_names
from exportkit.export.models.program_model import STATE, called_signature, graphs_of, rebuilt, taken
from exportkit.export.models.source_lines import called_at
from exportkit.export.record.state_buffers import StateBuffer, place_of, settled
from exportkit.export.torch_patches.dispatch import written_leaves
from exportkit.export.torch_patches.patched import Function, patched
from exportkit.export.torch_patches.quiet import quiet_torch


@contextmanager
def lifted(
    model: torch.nn.Module, bound: BoundCall, buffers: Sequence[StateBuffer], writes: Sequence[str]
) -> Iterator[None]:
    """Replaces a module's forward by one that takes the state as the keyword argument `exportkit_state`.

    The model has the state within forward alone: torch.export copes with few ways of changing buffers. What the model
    assigns to one is written into the argument. A result that shares memory with what is written becomes a copy,
    because the next call would change it.
    """
    if not buffers and not writes:
        yield
        return
    forward = model.forward
    wanted = written_names(bound.names, writes)
    held = _Places(model, [name for buffer in buffers for name in buffer.names])

    @functools.wraps(forward)
    def lifted_forward(*args: Any, **kwargs: Any) -> Any:
        state: tuple[torch.Tensor, ...] = kwargs.pop(STATE, ())
        # Parameters are leaves in the same memory: the model may ask for their gradients.
        state = tuple(t.detach().requires_grad_() if b.requires_grad else t for b, t in zip(buffers, state))
        held.fill({name: tensor for buffer, tensor in zip(buffers, state) for name in buffer.names})
        try:
            result = forward(*args, **kwargs)
        finally:
            now = held.take()
        new = [settled(tensor, {name: now[name] for name in buffer.names}) for buffer, tensor in zip(buffers, state)]
        # Of two buffers that change places, the first would be lost when the second is written.
        new = [t if t is old or not _shares(t, state) else t.clone() for old, t in zip(state, new)]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        changing = [*state, *(tensor for name, tensor in zip(bound.names, tensors) if name in wanted)]
        # Copied first: a result may be what a buffer was before the model assigned to it.
        result = tree_map_only(torch.Tensor, lambda t: t.clone() if _shares(t, changing) else t, result)
        for old, tensor in zip(state, new):
            if tensor is not old:
                old.copy_(tensor)
        return result

    if buffers:
        lifted_forward.__dict__["__signature__"] = _with_state(inspect.signature(forward))
    kept = patched("_trace.register_buffer_assignment_hook", held.note_others)
    with held.empty(), kept, with_forward(model, lifted_forward):
        yield


class _Places:
    """Where a model has its state."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        self._places = {name: place_of(model, name) for name in names}
        kept = {id(held): held for held, _ in self._places.values()}
        self._before = [(held, dict(held)) for held in kept.values()]

    @contextmanager
    def empty(self) -> Iterator[None]:
        """Takes the state out of the model while the block runs."""
        for held, key in self._places.values():
            del held[key]
        try:
            yield
        finally:
            for held, known in self._before:
                held.clear()
                held.update(known)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Gives the model its state."""
        for name, (held, key) in self._places.items():
            held[key] = tensors[name]
        for held, known in self._before:  # in their order, by which a model may ask for gradients
            ordered = {key: held[key] for key in (*known, *held) if key in held}
            held.clear()
            held.update(ordered)

    def note_others(self, note: Function, model: torch.nn.Module, assigned: dict[str, str]) -> Any:
        """Lets torch note what is assigned to buffers that are no state."""
        return note(model, _Others(assigned, self._places))

    def take(self) -> dict[str, torch.Tensor | None]:
        """Takes the state out again, and returns it by name."""
        return {name: held.pop(key, None) for name, (held, key) in self._places.items()}


class _Others(dict[str, str]):
    """Passes what it gets on to another dict, unless it has one of the names."""

    def __init__(self, to: dict[str, str], names: Collection[str]) -> None:
        super().__init__()
        self._to, self._names = to, names

    def __setitem__(self, name: str, value: str) -> None:
        if name not in self._names:
            self._to[name] = value


def _with_state(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    position = next((i for i, p in enumerate(parameters) if p.kind is inspect.Parameter.VAR_KEYWORD), len(parameters))
    parameters.insert(position, inspect.Parameter(STATE, inspect.Parameter.KEYWORD_ONLY))
    return signature.replace(parameters=parameters)


def _shares(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    alias: Any = getattr(torch._C, "_is_alias_of")  # noqa: B009 (torch declares none)
    return any(alias(tensor, other) for other in others)


# --- the traced program -----------------------------------------------------------------------------------------------


def written_tensors(program: ExportedProgram, *, traced: bool) -> tuple[list[int], list[str]]:
    """Finds what a program writes: the tensors that it takes, by their positions, and the buffers of its own.

    The fake tensors of one that was `traced` in this process share memory where the real ones do, and it need not be
    decomposed, which takes as long as tracing.
    """
    parts = graphs_of(program.graph_module)
    writing = [(part, node) for part in parts for node in part.graph.nodes if _written_by(node)]
    signature = program.graph_signature
    if traced and all(part is program.graph_module for part, _ in writing):
        written = [leaf.meta["val"] for _, node in writing for leaf in _written_by(node)]
        holders = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
        found = {n for n, v in holders.items() if isinstance(v, torch.Tensor) and _shares(v, written)}
        buffers = {signature.inputs_to_buffers[name] for name in found if name in signature.inputs_to_buffers}
    elif writing or signature.user_inputs_to_mutate or signature.buffers_to_mutate:
        try:
            with quiet_torch():
                signature = program.run_decompositions({}).graph_signature
        except Exception as error:  # torch raises several kinds where it cannot follow a write
            raise _written_within(program, writing) from error
        found, buffers = set(signature.user_inputs_to_mutate.values()), set(signature.buffers_to_mutate.values())
    else:
        return [], []
    return [position for position, name in enumerate(taken(program)) if name in found], sorted(buffers)


def written_constants(program: ExportedProgram) -> list[str]:
    """Returns the operators of a newly traced program that write into its constants, and the lines that call them."""
    names = program.graph_signature.inputs_to_lifted_tensor_constants
    constants = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    return [
        called_at(node)
        for node in program.graph.nodes
        if any(_shares(leaf.meta["val"], constants) for leaf in _written_by(node))
    ]


def _written_within(
    program: ExportedProgram, writing: Sequence[tuple[torch.fx.GraphModule, torch.fx.Node]]
) -> ExportError:
    lines = dict.fromkeys(called_at(node) for part, node in writing if part is not program.graph_module)
    return ExportError(
        "the model writes into a tensor inside of a branch or a loop, and torch cannot follow that:"
        + "".join(f"\n    {line}" for line in lines),
        hint="Write out of place there, `x = x + 1` and not `x += 1`, and return the new tensor.",
    )


def _written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the arguments that a node writes into."""
    # detach_, of torch.tensor(0) in a model, changes no value.
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is torch.ops.aten.detach_.default:
        return []
    leaves = written_leaves(node.target, node.args, node.kwargs)
    return [leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)]


def without_unused(program: ExportedProgram, count: int) -> tuple[ExportedProgram, list[int]]:
    """Returns a program that takes only the state tensors that it uses, and their positions among all.

    The last `count` tensors that it takes are state.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    names = taken(program)[-count:] if count else []
    used = [position for position, name in enumerate(names) if nodes[name].users]
    if len(used) == count:
        return program, used
    unused = {name for name in names if not nodes[name].users}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in unused:
            program.graph.erase_node(node)
    program.graph_module.recompile()
    before = program.graph_signature
    signature = ExportGraphSignature(
        input_specs=[spec for spec in before.input_specs if getattr(spec.arg, "name", None) not in unused],
        output_specs=list(before.output_specs),
    )
    args, kwargs = program.example_inputs
    state = tuple(kwargs[STATE][position] for position in used)
    kwargs = {**kwargs, STATE: state} if state else {name: value for name, value in kwargs.items() if name != STATE}
    called = called_signature(program)
    smaller = rebuilt(
        program,
        program.graph_module,
        signature,
        (args, kwargs),
        inputs=[each for each in called.inputs if getattr(each, "name", None) not in unused],
        in_spec=tree_structure((args, kwargs)),
        forward_arg_names=[name for name in called.forward_arg_names or () if name != STATE or state],
    )
    # They name the state by its positions among all. A session has the sizes that the manifest says.
    smaller._guards_code = [line for line in smaller._guards_code if STATE not in line]
    return smaller, used


def run_program(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Calls the module of a traced program, which writes into the state. Returns the tensors of its result."""
    result = module(*args, **kwargs, **({STATE: tuple(state)} if state else {}))
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
