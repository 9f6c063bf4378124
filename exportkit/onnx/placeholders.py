"""Puts one placeholder operator in the place of every call of a custom operator, so that conversion keeps the calls.

torch.onnx would refuse a custom operator, and drop what writes into an argument. The placeholder `exportkit_onnx::call`
takes tensors and sizes, returns new tensors, and has a key that says which call it stands for.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import sympy
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import CallMethodKey
from torch.utils._pytree import KeyPath, SequenceKey, tree_leaves

from exportkit.errors import ExportError
from exportkit.export.models.program_model import rebuilt
from exportkit.export.models.source_lines import where_traced
from exportkit.export.trace.preflight import is_custom, qualified_name
from exportkit.recurrent import NAMESPACE

Tensors = Sequence[torch.Tensor]
Sizes = Sequence[int | torch.SymInt]


@dataclass(frozen=True)
class Slot:
    """A place in a call's arguments that a tensor or a size fills. `index` counts tensors, or sizes."""

    kind: type[torch.Tensor] | type[torch.SymInt]
    index: int


@dataclass(frozen=True)
class CustomCall:
    """A call of a custom operator in a graph, whose arguments have slots for tensors and symbolic sizes.

    The names are the parameters of tensors and sizes, with a number for one of a list. `written` are the tensors that
    the operator writes into; `results` are the fake tensors that it returns, and after them those that it wrote.
    `where` is the line of the model that calls it, or "".
    """

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[torch.Tensor, ...]
    sizes: tuple[torch.SymInt, ...]
    tensor_names: tuple[str, ...]
    size_names: tuple[str, ...]
    written: tuple[int, ...]
    results: tuple[torch.Tensor, ...]
    where: str

    @property
    def name(self) -> str:
        """The operator's name in the manifest."""
        return qualified_name(self.operator)

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The mode of the fake tensors."""
        tensor = (*self.tensors, *self.results)[0]
        assert isinstance(tensor, FakeTensor)
        return tensor.fake_mode

    def run(self, function: Callable[..., Any], tensors: Tensors, sizes: Sizes) -> list[torch.Tensor]:
        """Calls the operator, or a function with its parameters, and returns its results in the order of `results`."""
        given = [tensor.clone() if i in self.written else tensor for i, tensor in enumerate(tensors)]

        def filled(value: Any) -> Any:
            if isinstance(value, Slot):
                return given[value.index] if value.kind is torch.Tensor else sizes[value.index]
            return [filled(item) for item in value] if isinstance(value, (list, tuple)) else value

        answer = function(*map(filled, self.args), **{name: filled(value) for name, value in self.kwargs.items()})
        results = [*_fresh(self.operator, answer), *(given[i] for i in self.written)]
        _check_like(self, results)
        return results


def _check_like(call: CustomCall, results: Sequence[torch.Tensor]) -> None:
    """Refuses results that a decomposition returns, and the operator does not: another number, dtype or rank."""
    wanted, given = (
        [f"{str(t.dtype).removeprefix('torch.')} with {t.ndim} dimensions" for t in some]
        for some in (call.results, results)
    )
    if wanted != given:
        raise ExportError(
            f"the decomposition of {call.name} returns {', '.join(given) or 'no tensor'}; the operator returns "
            f"{', '.join(wanted)}",
            hint="A decomposition returns what the operator returns, and writes into the same arguments.",
        )


_CALLS: dict[str, CustomCall] = {}  # the calls of the programs that are being converted, by key
_KEYS = itertools.count()


def _call(tensors: Tensors, sizes: Sizes, key: str) -> list[torch.Tensor]:
    """Calls the operator itself: its fake kernel, if the tensors are fake."""
    call = _CALLS[key]
    return call.run(call.operator, tensors, sizes)


torch.library.custom_op(
    "exportkit_onnx::call",
    _call,
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt[] sizes, str key) -> Tensor[]",
).register_fake(_call)

PLACEHOLDER: OpOverload = torch.ops.exportkit_onnx.call.default


@contextmanager
def with_placeholders(
    program: torch.export.ExportedProgram,
) -> Iterator[tuple[torch.export.ExportedProgram, Mapping[str, CustomCall]]]:
    """Yields a copy of a program with placeholders for custom operators, and the calls by key.

    The copy can be run and traced again only inside of the block. ExportError: a custom operator takes or returns
    something that a function of ONNX cannot.
    """
    module = copy.deepcopy(program.graph_module)
    calls = {}
    for part in list(module.modules()):
        if isinstance(part, GraphModule):
            for node in list(part.graph.nodes):
                if node.op == "call_function" and is_custom(node.target) and node.target.namespace != NAMESPACE:
                    key = f"{next(_KEYS)}"
                    calls[key] = _replace(node, key)
            part.graph.lint()
            part.recompile()
    changed = rebuilt(program, module, _signature(program, module.graph))
    _CALLS.update(calls)
    try:
        yield changed, calls
    finally:
        for key in calls:
            del _CALLS[key]


def _signature(
    program: torch.export.ExportedProgram, graph: torch.fx.Graph
) -> torch.export.graph_signature.ExportGraphSignature:
    """Returns a program's signature with the names of the results that a changed graph returns."""
    results = cast(Sequence[object], graph.output_node().args[0])
    specs = [
        replace(spec, arg=replace(spec.arg, name=result.name)) if isinstance(result, Node) else spec
        for spec, result in zip(program.graph_signature.output_specs, results)
    ]
    return torch.export.graph_signature.ExportGraphSignature(program.graph_signature.input_specs, specs)


def _replace(node: Node, key: str) -> CustomCall:
    call, tensors, sizes = _read(node)
    graph, results = node.graph, call.results
    with graph.inserting_before(node):
        placeholder = _added(node, PLACEHOLDER, (tensors, sizes, key), list(results))
        if bindings := node.meta.get("unbacked_bindings"):
            placeholder.meta["unbacked_bindings"] = _sizes_from_data(bindings, results)
        values = [_added(node, operator.getitem, (placeholder, i), value) for i, value in enumerate(results)]
        fresh, written = values[: len(results) - len(call.written)], values[len(results) - len(call.written) :]
        for i, value in zip(call.written, written):
            _added(node, torch.ops.aten.copy_.default, (tensors[i], value), tensors[i].meta["val"])
    _give_results(node, iter(fresh), tensors, call)
    graph.erase_node(node)
    return call


def _added(like: Node, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Node:
    """Adds a node that has the metadata of another, such as its line, and a value."""
    node = like.graph.call_function(target, args)
    node.meta = {name: known for name, known in like.meta.items() if name != "unbacked_bindings"} | {"val": value}
    return node


def _sizes_from_data(bindings: Mapping[sympy.Symbol, object], results: Tensors) -> dict[sympy.Symbol, KeyPath]:
    """Returns the places of sizes that depend on data in a placeholder's list of results."""
    sizes: list[tuple[Any, KeyPath]] = [
        (size, (SequenceKey(i), CallMethodKey("size"), SequenceKey(axis)))
        for i, result in enumerate(results)
        for axis, size in enumerate(result.shape)
        if isinstance(size, torch.SymInt)
    ]
    return {size.node.expr: place for size, place in sizes if size.node.expr in bindings}


def _give_results(node: Node, fresh: Iterator[Node], tensors: Sequence[Node], call: CustomCall) -> None:
    """Lets the users of a custom operator's results use those of its placeholder."""
    returns = call.operator._schema.returns
    answer = node.meta["val"] if len(returns) > 1 else [node.meta["val"]]
    slots = {name: tensors[i] for i, name in enumerate(call.tensor_names)}
    given: list[Any] = []
    for result, value in zip(returns, answer):
        if result.alias_info:  # the argument itself, which the placeholder's results were copied into
            given.append(slots[_aliased(call.operator, result)])
        elif isinstance(value, torch.Tensor):
            given.append(next(fresh))
        elif isinstance(value, (list, tuple)):
            given.append([next(fresh) for _ in value])
        else:
            given.append(value)
    _replace_uses(node, given if len(returns) > 1 else given[0] if given else None)


def _aliased(operator: OpOverload, result: Any) -> str:
    names = result.alias_info.before_set
    return next(p.name for p in operator._schema.arguments if p.alias_info and p.alias_info.before_set == names)


def _replace_uses(node: Node, value: Any) -> None:
    if isinstance(value, Node):
        node.replace_all_uses_with(value)
        return
    for user in list(node.users):
        if user.op != "call_function" or user.target is not operator.getitem:
            raise ExportError(f"{user.format_node()} takes all results of {node.target} at once")
        _replace_uses(user, value[user.args[1]])
        user.graph.erase_node(user)


def _read(node: Node) -> tuple[CustomCall, list[Node], list[Node]]:
    operator = node.target
    assert isinstance(operator, OpOverload)
    parameters = operator._schema.arguments
    found: dict[type, list[tuple[str, Node]]] = {torch.Tensor: [], torch.SymInt: []}
    written: list[int] = []

    def slots(value: Any, name: str, writes: bool) -> Any:
        if isinstance(value, Node):
            kind = torch.Tensor if isinstance(value.meta["val"], torch.Tensor) else torch.SymInt
            if kind is torch.SymInt and not isinstance(value.meta["val"], (int, torch.SymInt)):
                raise ExportError(
                    f"operator {qualified_name(operator)} takes {name}, a {type(value.meta['val']).__name__} that "
                    "varies from call to call",
                    hint="Pass it as a tensor without dimensions.",
                )
            if writes:
                written.append(len(found[torch.Tensor]))
            found[kind].append((name, value))
            return Slot(kind, len(found[kind]) - 1)
        if isinstance(value, (list, tuple)):
            return [slots(item, f"{name}_{i}", writes) for i, item in enumerate(value)]
        return value

    def writes(argument: Any) -> bool:
        return argument.alias_info is not None and argument.alias_info.is_write

    named = {parameter.name: parameter for parameter in parameters}
    args = tuple(slots(value, p.name, writes(p)) for p, value in zip(parameters, node.args))
    kwargs = {name: slots(value, name, writes(named[name])) for name, value in node.kwargs.items()}
    tensors = tuple(n.meta["val"] for _, n in found[torch.Tensor])
    call = CustomCall(
        operator=operator,
        args=args,
        kwargs=kwargs,
        tensors=tensors,
        sizes=tuple(n.meta["val"] for _, n in found[torch.SymInt]),
        tensor_names=tuple(name for name, _ in found[torch.Tensor]),
        size_names=tuple(name for name, _ in found[torch.SymInt]),
        written=tuple(written),
        results=(*_fresh(operator, node.meta.get("val")), *(tensors[i] for i in written)),
        where=where_traced(node),
    )
    return call, [n for _, n in found[torch.Tensor]], [n for _, n in found[torch.SymInt]]


def _fresh(operator: OpOverload, answer: Any) -> list[torch.Tensor]:
    """Returns the tensors of an operator's answer that are not its arguments."""
    returns = operator._schema.returns
    parts = answer if len(returns) > 1 and isinstance(answer, (list, tuple)) else [answer]
    fresh = [part for result, part in zip(returns, parts) if not result.alias_info]
    return [leaf for leaf in tree_leaves(fresh) if isinstance(leaf, torch.Tensor)]
