"""The fingerprint of a traced program: the digest of everything that code may depend on.

What this module does not know is refused, never left out, so that no program is taken for another one. Left out are
the lines of source that torch notes at each node: they reach nothing but comments.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import sympy
import torch
from torch._higher_order_ops import effects
from torch._library import simple_registry
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from exportkit.export.record.host_copies import elements
from exportkit.export.torch_patches.opaque import has_one_kernel, has_own_fake
from exportkit.libraries import TORCH_NAMESPACES

# Where a node comes from: comments in the generated code. `from_node` counts by its operators (eager_kernels.py).
_SOURCE_LINES = frozenset(
    {"stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "seq_nr", "tensor_meta", "desc"}
)
# The state of torch's sizes, as torch 2.11 to 2.15 call it.
_SIZE_STATE = (
    *("var_to_val", "backed_var_to_val", "var_to_range", "replacements", "divisible", "size_like", "guards"),
    *("deferred_runtime_asserts", "unbacked_var_to_val", "var_to_hint_override", "axioms", "specialize_zero_one"),
    *("oblivious_var_to_val", "assume_static_by_default", "duck_shape", "real_tensor_prop_unbacked_vals"),
)
_MODULES = frozenset({"_operator", "operator", "math", "builtins", "_functools"})
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_get_effect = getattr(effects, "_get_effect", None)  # not in torch 2.11
_ALIGNED = 64  # bytes; more than Inductor asks for


class UnknownPartError(Exception):
    """A program has a part that cannot be written down. The message names it."""


def program_fingerprint(program: torch.export.ExportedProgram, *, values: bool) -> str:
    """Returns the digest of a program: equal digests, equal code.

    `values`: whether the values of its weights count. Those of other constants always do.

    Raises:
        UnknownPartError: It has a part of which this module does not know whether code depends on it.
    """
    lines = [*_graph(program.graph_module)]
    lines += [f"inputs {encoded(spec)}" for spec in program.graph_signature.input_specs]
    lines += [f"outputs {encoded(spec)}" for spec in program.graph_signature.output_specs]
    lines += sorted(f"range {name} {bounds}" for name, bounds in program.range_constraints.items())
    lines += [f"structure {encoded(program.call_spec.in_spec)} {encoded(program.call_spec.out_spec)}"]
    leaves, structure = tree_flatten(program.example_inputs)
    lines += [f"example {encoded(structure)}", *(f"example {encoded(leaf)}" for leaf in leaves)]
    lines += [*_tensors("weight", program.state_dict, values=values)]
    lines += [*_tensors("constant", program.constants, values=True)]
    lines += [*_sizes(program.graph_module)]
    text = "\n".join(lines)
    if address := _ADDRESS.search(text):
        line = text[text.rfind("\n", 0, address.start()) + 1 : address.start()]
        raise UnknownPartError(f"{line[-80:]} has no text of its own")
    return hashlib.sha256(text.encode()).hexdigest()


def encoded(value: Any) -> str:
    """Writes a value down.

    Raises:
        UnknownPartError: Its kind is not known.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type(...))):
        return repr(value)
    for kinds, write in _WRITERS:
        if isinstance(value, kinds):
            return write(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__qualname__}{encoded(fields)}"
    raise UnknownPartError(f"a {type(value).__module__}.{type(value).__qualname__}")


def _graph(module: torch.fx.GraphModule) -> Iterator[str]:
    """Yields a line for each node, and the lines of the graphs within."""
    for node in module.graph.nodes:
        meta = {key: value for key, value in node.meta.items() if key not in _SOURCE_LINES}
        made_from = [_origin(source) for source in node.meta.get("from_node") or ()]
        target = node.target if isinstance(node.target, str) else _operator(node.target)
        yield " ".join(
            [node.op, node.name, target, encoded(node.args), encoded(node.kwargs), encoded(meta), *made_from]
        )
    yield f"meta {encoded(dict(module.meta))}"
    for name, part in module.named_children():
        if not isinstance(part, torch.fx.GraphModule):
            if any(True for _ in part.parameters()) or any(True for _ in part.buffers()) or [*part.children()]:
                raise UnknownPartError(f"the module {name}, which is no graph")
            continue
        yield f"graph {name}"
        yield from _graph(part)
        yield f"end {name}"


def _origin(source: Any) -> str:
    deeper = ",".join(map(_origin, source.from_node))
    target = source.target if isinstance(source.target, str) else str(source.target)
    return f"{source.name}:{_ADDRESS.sub('', target)}({deeper})"


def _operator(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target) if target.namespace in TORCH_NAMESPACES else _custom(target)
    if isinstance(target, HigherOrderOperator):
        if "triton" in target.name():
            raise UnknownPartError(f"{target.name()}, a kernel of Triton's")
        return f"higher order {target.name()}"
    module = getattr(target, "__module__", None) or ""
    if module in _MODULES or module.partition(".")[0] == "torch":
        return f"{module}.{target.__qualname__}"
    raise UnknownPartError(f"the function {module}.{getattr(target, '__qualname__', target)}")


def _custom(operator: OpOverload) -> str:
    """Writes down an operator that the code calls by its name, and refuses others: code of theirs would count."""
    name = operator.name()
    entry = simple_registry.singleton.find(name)
    lowering = vars(sys.modules.get("torch._inductor.lowering", ModuleType("none")))
    called = operator in lowering.get("fallbacks", ())  # Inductor has compiled a call of it before
    tables = [*torch._decomp.global_decomposition_table.values()]
    tables += [] if called else [lowering.get("lowerings", {}), lowering.get("_maybe_layout_constraints", {})]
    apart = (
        (has_one_kernel(operator) and not has_own_fake(operator))
        or bool(vars(entry.torch_dispatch_rules).get("_data"))
        or any(not isinstance(key, torch._C.DispatchKey) or "Composite" in key.name for key in operator.py_kernels)
    )
    if apart or any(operator in table for table in tables):
        raise UnknownPartError(f"{name}, which is taken apart when it is compiled")
    effect = _get_effect(operator) if _get_effect else None
    return f"{name} {operator._schema} {sorted(map(str, operator.tags))} {effect}"


def _tensors(what: str, tensors: Mapping[str, Any], *, values: bool) -> Iterator[str]:
    """Yields a line for each tensor, and which of them are one tensor in memory."""
    groups: dict[Any, int] = {}
    for name, tensor in sorted(tensors.items()):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise UnknownPartError(f"{what} {name}, a {type(tensor).__name__}")
        where = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        group = groups.setdefault(where, len(groups))
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous() if values else None
        content = "" if plain is None else hashlib.sha256(elements(plain)).hexdigest()
        yield f"{what} {name} {encoded(tensor)} {group} {content}"


def _sizes(module: torch.fx.GraphModule) -> Iterator[str]:
    """Yields what torch knows of the sizes: their values in the example, ranges, and conditions."""
    values = (leaf for node in module.graph.nodes for leaf in tree_leaves(node.meta.get("val")))
    modes = {id(value.fake_mode): value.fake_mode for value in values if isinstance(value, FakeTensor)}
    for mode in modes.values():
        state = mode.shape_env
        for name in _SIZE_STATE:
            if state is not None and (value := vars(state).get(name)) is not None:
                yield f"sizes {name} {_size_state(value)}"


def _size_state(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(sorted(f"{key}: {_size_state(each)}" for key, each in value.items()))
    if isinstance(value, (set, frozenset)):
        return str(sorted(map(str, value)))
    if isinstance(value, (list, tuple)):
        return str([_size_state(each) for each in value])
    return str(getattr(value, "expr", value))  # a guard also has the stack of whoever asked


def _tensor(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        raise UnknownPartError(f"a tensor with the layout {tensor.layout}")
    kind: Any = torch.Tensor if isinstance(tensor, FakeTensor) else type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnknownPartError(f"a {kind.__qualname__}")
    try:
        aligned = "" if isinstance(tensor, FakeTensor) or not tensor.numel() else str(tensor.data_ptr() % _ALIGNED == 0)
    except RuntimeError as error:  # one that torch.func's transforms left in the graph
        raise UnknownPartError("a tensor without memory of its own") from error
    shape = [encoded(size) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
    flags = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), isinstance(tensor, torch.nn.Parameter))
    return f"{tensor.dtype} {tensor.device} {shape} {flags} {aligned}"


_WRITERS: tuple[tuple[Any, Any], ...] = (
    (torch.fx.Node, lambda value: f"%{value.name}"),
    (torch.Tensor, _tensor),
    (
        (torch.SymInt, torch.SymFloat, torch.SymBool),
        lambda value: f"{type(value).__name__}({value.node.expr}, {getattr(value.node, '_hint', None)})",
    ),
    ((torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator), repr),
    (enum.Enum, str),
    (slice, lambda value: f"slice{encoded((value.start, value.stop, value.step))}"),
    ((OpOverload, HigherOrderOperator), _operator),
    (OpOverloadPacket, str),
    (sympy.Basic, sympy.srepr),
    (TreeSpec, repr),
    (Mapping, lambda value: f"{{{', '.join(f'{encoded(key)}: {encoded(each)}' for key, each in value.items())}}}"),
    ((set, frozenset), lambda value: f"set{sorted(map(encoded, value))}"),
    ((list, tuple), lambda value: f"{type(value).__name__}({', '.join(map(encoded, value))})"),
    (type, lambda value: f"{value.__module__}.{value.__qualname__}"),
)
