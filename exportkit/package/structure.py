"""Converts nested Python values to a flat list of leaves and a Node for the manifest, and back.

Does not import torch: the caller decides what a leaf is. Containers are lists, tuples, named tuples, dataclasses and
dicts with string keys, because a manifest can describe these and any host can rebuild them without the model's source.
A dataclass comes back as a named tuple with its fields. Other values would need pickle, so they are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, assert_never

from exportkit.errors import ManifestConsistencyError, UsageError
from exportkit.package import core
from exportkit.package.manifest import (
    Call,
    ConstantNode,
    MappingNode,
    NamedTupleNode,
    Node,
    Parameter,
    SequenceNode,
    TensorNode,
)

MAX_DEPTH = 32  # levels of containers; also stops at a value that contains itself

Leaf = TypeVar("Leaf")


def flatten(
    value: Any, is_leaf: Callable[[Any], bool], *, start: int = 0, where: str = "value"
) -> tuple[Node, list[Any]]:
    """Splits a nested value into its structure and its leaves.

    Args:
        value: Leaves and constants (None, bool, int, float, str) in lists, tuples, named tuples, dataclasses and dicts
            with string keys.
        is_leaf: Returns whether a value is a leaf, such as a tensor.
        start: The index of the first leaf, for values whose leaves share one list.
        where: The value's name for error messages, such as "parameter `batch`".

    Returns:
        The structure and its leaves. `TensorNode(index=start + i)` stands for leaf i. The leaves have the same order as
        in torch's pytrees, and so in an exported program's flat inputs and outputs.

    Raises:
        UsageError: A manifest cannot describe a part of the value. The message says which part.
    """
    visitor = _Visitor(is_leaf, start)
    return visitor.visit(value, where, 0), visitor.leaves


class _Visitor:
    """Collects leaves. A function inside of `flatten` that calls itself would be a circle, and keep them in memory."""

    def __init__(self, is_leaf: Callable[[Any], bool], start: int) -> None:
        self.is_leaf = is_leaf
        self.start = start
        self.leaves: list[Any] = []

    def visit(self, value: Any, path: str, depth: int) -> Node:
        """Returns the structure of a part of the value, and appends its leaves."""
        if self.is_leaf(value):
            self.leaves.append(value)
            return TensorNode(index=self.start + len(self.leaves) - 1)
        if value is None or isinstance(value, (bool, int, float, str)):
            return ConstantNode(value=_constant(value, path))
        if depth == MAX_DEPTH:
            raise UsageError(f"{path} is nested deeper than {MAX_DEPTH} containers", hint="Pass a flatter structure.")
        if fields := fields_of(value):
            _check_names(type(value).__name__, fields, path)
            parts = zip(fields, parts_of(value))
            items = tuple(self.visit(item, f"{path}.{field}", depth + 1) for field, item in parts)
            return NamedTupleNode(class_name=type(value).__name__, fields=fields, items=items)
        if type(value) in (list, tuple):
            items = tuple(self.visit(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value))
            return SequenceNode(kind="list" if type(value) is list else "tuple", items=items)
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise UsageError(f"{path} is a dict with the key {key!r}; keys must be strings")
            items = tuple(self.visit(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items())
            return MappingNode(keys=tuple(value), items=items)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(f"{path} is a {kind}, which a package cannot describe", hint=_advice(kind))


def unflatten(node: Node, leaves: Sequence[Leaf]) -> Any:
    """Builds the value that `node` describes from the leaves.

    Raises:
        ManifestConsistencyError: A leaf is missing.
    """
    try:
        return builder(node)(leaves)
    except IndexError:
        raise ManifestConsistencyError(f"the structure needs more than the {len(leaves)} tensors given") from None


def arguments(call: Call, leaves: Sequence[Leaf]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Builds the positional and the keyword arguments of a call from its flat inputs, as `unflatten` builds values."""
    values = [(parameter, unflatten(parameter.value, leaves)) for parameter in call.parameters]
    args = tuple(value for parameter, value in values if parameter.kind == "positional")
    return args, {parameter.name: value for parameter, value in values if parameter.kind == "keyword"}


def plain(value: Any) -> Any:
    """Replaces named tuples and dataclasses in a nested value by plain tuples."""
    if isinstance(value, tuple) or is_dataclass_instance(value):
        return tuple(map(plain, parts_of(value)))
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def builder(node: Node) -> Callable[[Sequence[Leaf]], Any]:
    """Returns a function that builds the value from leaves. It reads the structure only once, unlike `unflatten`.

    The function does not check the number of leaves.
    """
    if isinstance(node, TensorNode):
        index = node.index
        return lambda leaves: leaves[index]
    if isinstance(node, ConstantNode):
        value = node.value
        return lambda leaves: value
    parts = [builder(item) for item in node.items]
    if isinstance(node, SequenceNode):
        if node.kind == "list":
            return lambda leaves: [part(leaves) for part in parts]
        return lambda leaves: tuple([part(leaves) for part in parts])
    if isinstance(node, MappingNode):
        keys = node.keys
        return lambda leaves: {key: part(leaves) for key, part in zip(keys, parts)}
    if isinstance(node, NamedTupleNode):
        make = named_tuple_class(node.class_name, node.fields)
        return lambda leaves: make(*[part(leaves) for part in parts])
    assert_never(node)


def call_text(parameters: Sequence[Parameter]) -> str:
    """Returns a call as it is written, without what is fixed: "(sample={'image': image, 'mask': mask})"."""
    given = [each for each in parameters if names(each.value, each.name)]
    return f"({', '.join(f'{each.name}={_written(each.value, each.name)}' for each in given)})"


def _written(node: Node, name: str) -> str:
    if isinstance(node, TensorNode):
        return name if name.isidentifier() else "tensor"
    if isinstance(node, ConstantNode):
        return repr(node.value)
    steps = _steps(node)
    parts = [_written(item, step if step.isidentifier() else name) for step, item in zip(steps, node.items)]
    if isinstance(node, MappingNode):
        return f"{{{', '.join(f'{key!r}: {part}' for key, part in zip(node.keys, parts))}}}"
    if isinstance(node, NamedTupleNode):
        return f"{node.class_name}({', '.join(f'{field}={part}' for field, part in zip(node.fields, parts))})"
    comma = "," if len(parts) == 1 else ""
    return f"[{', '.join(parts)}]" if node.kind == "list" else f"({', '.join(parts)}{comma})"


def names(node: Node, prefix: str = "") -> list[str]:
    """Returns the leaves' names in order: "image", "batch.mask", "1.0", or "0" for a single leaf without a prefix.

    Args:
        node: The structure.
        prefix: The name of the whole value, such as its parameter's name.

    Raises:
        UsageError: Two leaves have the same name, as in `{"a.b": x, "a": {"b": y}}`.
    """
    found = list(_leaf_names(node, prefix))
    if repeated := sorted(name for name, count in Counter(found).items() if count > 1):
        raise UsageError(
            f"two tensors would have the name {repeated[0]!r}",
            hint="Rename a key. A dot in a key stands for nesting.",
        )
    return found


@functools.lru_cache(maxsize=256)
def named_tuple_class(class_name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """Returns the named tuple with this name and these fields, the same class every time."""
    return namedtuple(class_name, fields)


def check_name(name: str, what: str) -> None:
    """Checks that a package may use a name, before a model is exported with it.

    Args:
        name: The name of a parameter, a named tuple or a field.
        what: A description of the named object, for the message.

    Raises:
        UsageError: The name is not allowed.
    """
    if "\0" in name or not core.library().ek_is_name(name.encode(errors="backslashreplace")):
        raise UsageError(
            f"{what} is named {name!r}; use ASCII letters, digits and _, but not a Python keyword",
            hint="Rename it.",
        )


def _check_names(class_name: str, fields: Sequence[str], path: str) -> None:
    check_name(class_name, f"the named tuple {path}")
    for name in fields:
        if name.startswith("_"):
            raise UsageError(f"a field of {path} is named {name!r}; it cannot start with an underscore")
        check_name(name, f"a field of {path}")


def _leaf_names(node: Node, path: str) -> Iterator[str]:
    if isinstance(node, TensorNode):
        yield path or "0"
    elif not isinstance(node, ConstantNode):
        for step, item in zip(_steps(node), node.items):
            yield from _leaf_names(item, f"{path}.{step}" if path else step)


def _steps(node: SequenceNode | MappingNode | NamedTupleNode) -> Sequence[str]:
    if isinstance(node, SequenceNode):
        return [str(i) for i in range(len(node.items))]
    return node.keys if isinstance(node, MappingNode) else node.fields


def is_dataclass_instance(value: Any) -> bool:
    """Tells whether a value is an instance of a dataclass that its fields make.

    A dict may be one as well, such as transformers' ModelOutput, and is taken for a dict.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, dict)):
        return False
    return all(field.init for field in dataclasses.fields(value))


def fields_of(value: Any) -> tuple[str, ...]:
    """Returns the fields of a dataclass, a named tuple or a result such as torch.max's. Other values have none."""
    if is_dataclass_instance(value):
        return tuple(field.name for field in dataclasses.fields(value))
    if not isinstance(value, tuple) or type(value) is tuple:
        return ()
    if hasattr(value, "_fields"):
        return tuple(value._fields)
    # A C struct sequence names its fields here (Python >= 3.10).
    return tuple(getattr(type(value), "__match_args__", ()))


def parts_of(value: Any) -> tuple[Any, ...]:
    """Returns the values of a tuple, or those of the fields of a dataclass."""
    return tuple(value) if isinstance(value, tuple) else tuple(getattr(value, field) for field in fields_of(value))


def _advice(kind: str) -> str:
    """Returns what to use instead of a class that a package cannot describe."""
    if kind.startswith("transformers.cache_utils."):
        return (
            "Export with use_cache=False (example_kwargs of an ExportSpec, or model.config.use_cache), or wrap the "
            "model so that keys and values go in and out as tensors, as own-models.md of the documentation shows."
        )
    if kind == "numpy.ndarray":
        return "Use a tensor: torch.from_numpy(array)."
    containers = "lists, tuples, named tuples, dataclasses and dicts with string keys"
    return f"Use tensors, numbers, strings and None, in {containers}."


def _constant(value: bool | int | float | str | None, path: str) -> bool | int | float | str | None:
    """Converts a constant to a value that JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{path} is {value}, which JSON cannot hold", hint="Make it part of the model.")
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        raise UsageError(f"{path} is {value}, which does not fit in 64 bits")
    # Values of subclasses, such as string enums and numpy's float64, become plain values here.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else str.__str__(value)
