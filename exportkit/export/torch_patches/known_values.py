"""Lets tracing know the values that follow from what is fixed: numbers in the code, weights, buffers, and sizes."""

from __future__ import annotations

import operator as python
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import get_proxy_slot, has_proxy_slot
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.export.torch_patches.needed_nodes import needed_for, writes
from exportkit.export.torch_patches.patched import Function, patched
from exportkit.export.torch_patches.size_arithmetic import SYMBOLS, SizeArithmetic, UnknownValueError

_ITEM = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INSIDE = (  # which read the last of their tensors, by operators within them
    torch.ops.aten.repeat_interleave.self_Tensor,
    torch.ops.aten.where.default,
    torch.ops.aten.nonzero_numpy.default,
    torch.ops.aten.tensor_split.tensor_indices_or_sections,
    torch.ops.aten.one_hot.default,
)

Node = torch.fx.Node


def known_values(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Lets `if`, int(), .item(), .tolist() and sizes have values that follow from what is fixed, while the block runs.

    Such a value is computed by what the graph has so far: from the weights, or from the symbols of sizes. A value that
    follows from an input is unknown, and from state, which is an input then. Where an integer or a truth follows from
    a weight that may be swapped, the program asserts that it follows from the other one, too.
    """
    return patched("proxy_tensor.maybe_handle_decomp", _KnownValues(model).read)


class _KnownValues:
    """The weights of a model, and which nodes of graphs stand for them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._real = _weights(model)
        self._swapped = set(model.state_dict())
        self._tracing = False
        self._names: WeakKeyDictionary[Any, dict[Node, str]] = WeakKeyDictionary()

    def read(self, decomposed: Function, mode: Any, operator: OpOverload, args: Any, kwargs: Any) -> Any:
        """Traces a value in place of an operator, where that is known; else what torch traces."""
        if not self._tracing and (operator in _INSIDE or not _READS.isdisjoint(operator.tags)):
            try:
                return self._known(mode, operator, args, kwargs)
            except UnknownValueError:
                pass
        return decomposed(mode, operator, args, kwargs)

    def _known(self, mode: Any, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what an operator reads, or its answer with the sizes that are known. Raises UnknownValueError."""
        if operator is torch.ops.aten.index.Tensor:
            return self._chosen(mode, *args)
        if operator in _INSIDE:
            *_, read = (each for each in args if isinstance(each, torch.Tensor))
            self._value(mode, torch.ops.aten.alias.default, (read,), {})
            with mode:
                return operator.decompose(*args, **kwargs)
        value, swapped = self._value(mode, operator, args, kwargs)
        if torch.Tag.dynamic_output_shape in operator.tags:
            shapes = iter([real.shape for real in tree_leaves(value)])
            answer = self._traced(mode, operator, args, kwargs)
            with mode:
                return tree_map_only(torch.Tensor, lambda tensor: _of_shape(tensor, next(shapes)), answer)
        if swapped:
            if operator not in _ITEM or isinstance(value, float):  # which is read in each call, and may be another
                raise UnknownValueError
            with mode:
                torch._assert_async(args[0].eq(value), _OTHER_WEIGHTS)
        return value

    def _chosen(self, mode: Any, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Returns what masks choose by the indices that they stand for. Raises UnknownValueError."""
        masks = [each for each in indices if each is not None and each.dtype == torch.bool]
        if not masks:
            raise UnknownValueError
        for mask in masks:
            self._value(mode, torch.ops.aten.alias.default, (mask,), {})
        with mode:
            places: list[torch.Tensor | None] = []
            for each in indices:
                places += each.nonzero().unbind(1) if each is not None and each.dtype == torch.bool else (each,)
            return torch.ops.aten.index.Tensor(tensor, places)

    def _traced(self, mode: Any, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Traces a call as torch does."""
        self._tracing = True
        try:
            with mode:
                return operator(*args, **kwargs)
        finally:
            self._tracing = False

    def _value(
        self, mode: Any, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, bool]:
        """Returns an operator's answer, and whether it follows from a weight that may be swapped.

        Raises:
            UnknownValueError: It follows from more than what is fixed.
        """
        names = self._placeholders(mode.tracer)
        given = tree_map_only(torch.Tensor, partial(_node_of, mode.tracer), (args, kwargs))
        nodes = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Node)]
        needed = needed_for(nodes, until=lambda node: _number(node) is not None)
        if not all(node in names or _is_computed(node) for node in needed):
            raise UnknownValueError
        symbolic = any(isinstance(_number(node), SYMBOLS) for node in needed)
        if symbolic and operator not in _ITEM:
            raise UnknownValueError
        written = any(map(writes, needed))
        with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
            sizes = SizeArithmetic(mode) if symbolic else None
            known: dict[Node, Any] = {}
            for node in [node for node in mode.tracer.graph.nodes if node in needed] if needed else []:
                if (number := _number(node)) is not None:
                    known[node] = number
                elif node.op == "call_function":
                    known[node] = (sizes.run if sizes else _run)(node, known)
                else:
                    held = self._real[names[node]] if node in names else getattr(mode.tracer.root, node.target)
                    held = held.detach().clone() if written else held.detach()
                    known[node] = sizes.of(held) if sizes else held
            args_known, kwargs_known = tree_map_only(Node, known.__getitem__, given)
            answer = sizes.number(args_known[0]) if sizes else operator(*args_known, **kwargs_known)
        return answer, any(names.get(node) in self._swapped for node in needed)

    def _placeholders(self, tracer: Any) -> dict[Node, str]:
        """Returns the names of the weights by their nodes in the graph that is being traced."""
        if tracer not in self._names:
            held = {name: tensor for name, tensor in _weights(self._model).items() if has_proxy_slot(tensor, tracer)}
            nodes = {_node_of(tracer, tensor): name for name, tensor in held.items()}
            self._names[tracer] = {node: name for node, name in nodes.items() if node.op == "placeholder"}
        return self._names[tracer]


_OTHER_WEIGHTS = "the weights decide otherwise than those that the model was exported with: export it with these"


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def _node_of(tracer: Any, tensor: torch.Tensor) -> Any:
    """Returns the node that made a tensor, or the tensor itself if the model has it outside of its weights."""
    if has_proxy_slot(tensor, tracer):
        return get_proxy_slot(tensor, tracer).proxy.node
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnknownValueError
    return tensor


def _of_shape(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a tensor as one of the shape that it has."""
    for size, known in zip(tensor.shape, shape):
        torch._check(size == known)
    return tensor.view(shape)  # torch does not take a size for 1 because it must be


def _number(node: Node) -> Any:
    """Returns the number that a node stands for, or the symbol of a size; None for a tensor."""
    value = node.meta.get("val")
    if isinstance(value, SYMBOLS):
        concrete = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None
        return value if concrete is None else concrete
    return value if isinstance(value, (bool, int, float)) else None


def _is_computed(node: Node) -> bool:
    """Tells whether a node has the same value in each call if its arguments have."""
    if _number(node) is not None or node.op == "get_attr":
        return True
    if node.target is python.getitem:
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded not in node.target.tags


def _run(node: Node, known: Mapping[Node, Any]) -> Any:
    args, kwargs = tree_map_only(Node, known.__getitem__, (node.args, node.kwargs))
    function: Any = node.target
    return function(*args, **kwargs)
