"""Binds the arguments of a module's forward and describes them for the manifest."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

from exportkit.errors import UsageError
from exportkit.package.manifest import Parameter
from exportkit.package.structure import check_name, flatten, is_dataclass_instance, names, plain

_POSITIONALS, _KEYWORDS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_NO_TENSOR = re.compile(r"(?!.*Tensor).*\b(str|int|float|bool|Literal)\b")  # an annotation

DYNAMIC_SPEC = "_dynamic_spec"
"""Where torch 2.15's `@dynamic_spec` keeps the sizes of a forward."""


def is_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor, the leaf of a structure."""
    return isinstance(value, torch.Tensor)


def look_into_dataclasses(value: Any) -> None:
    """Lets torch's pytrees see the tensors in the dataclasses of a nested value."""
    for leaf in tree_leaves(value):
        if is_dataclass_instance(leaf):  # a leaf, because torch does not know the class
            _register_dataclass(type(leaf))
            look_into_dataclasses(leaf)


def _register_dataclass(made: type[Any]) -> None:
    fields = [field.name for field in dataclasses.fields(made)]

    def parts(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, field) for field in fields], None

    register_pytree_node(made, parts, lambda values, _: made(**dict(zip(fields, values))))


def check_plain(what: str, tensor: torch.Tensor) -> None:
    """Checks that a tensor is an array of numbers in memory."""
    if is_lazy(tensor):
        kind = "of a lazy module that never ran"
        advice = "Run the model once before export: let MODEL be a function that makes it, calls it and returns it."
    elif tensor.is_meta:
        kind, advice = (
            "on the meta device, without data",
            "Load the weights first: module.to_empty(device='cpu') makes room.",
        )
    elif tensor.is_quantized:
        kind, advice = f"quantized ({tensor.dtype})", "Use tensor.dequantize(), or integers with a scale of their own."
    elif tensor.is_nested:
        kind, advice = "nested", "Use torch.nested.to_padded_tensor, and a mask."
    elif tensor.layout is not torch.strided:
        kind, advice = f"sparse ({tensor.layout})", "Use tensor.to_dense(), or pass its indices and its values."
    elif is_traceable_wrapper_subclass(tensor):
        kind, advice = f"a {type(tensor).__name__}, which wraps other tensors", "Pass these, and make it in forward."
    else:
        return
    raise UsageError(f"{what} is {kind}, which a package cannot hold", hint=advice)


def needed_tensors(model: torch.nn.Module) -> list[str]:
    """Returns the names of the tensors that every call of forward must give; of all its tensors if there is none.

    A parameter annotated with a number, a string or a bool is no tensor.
    """
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind is not _KEYWORDS]
    needed = [p for p in parameters if p.default is inspect.Parameter.empty and p.kind is not _POSITIONALS]
    tensors = [p for p in needed or parameters if not _NO_TENSOR.match(inspect.formatannotation(p.annotation))]
    return [p.name if p.kind is not _POSITIONALS else f"{p.name}_0" for p in tensors]


def bind_call(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, partial: bool = False
) -> dict[str, Any]:
    """Returns the given arguments by name, in the order of forward's signature."""
    signature = inspect.signature(model.forward)
    try:
        bound = (signature.bind_partial if partial else signature.bind)(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"the example inputs do not fit {type(model).__name__}.forward{signature}: {error}") from error
    return spread(model, bound.arguments)


def spread(model: torch.nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what forward's parameters have, with a name for each part of `*args` and `**kwargs`.

    The parts of `*args` are `args_0` and so on, those of `**kwargs` have the names that a call gives them.

    Raises:
        UsageError: Two of them have one name.
    """
    parameters = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        kind = parameters[name].kind if name in parameters else None
        if kind is _POSITIONALS and isinstance(value, (tuple, list)):
            parts = {f"{name}_{i}": part for i, part in enumerate(value)}
        else:
            parts = dict(value) if kind is _KEYWORDS and isinstance(value, Mapping) else {name: value}
        if twice := parts.keys() & found.keys():
            raise UsageError(f"two arguments of {type(model).__name__}.forward have the name {min(twice)}")
        found |= parts
    return found


def rebind(model: torch.nn.Module, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs). Arguments are positional up to the first that is missing or keyword-only."""
    args: list[Any] = []
    left = dict(arguments)
    for parameter in inspect.signature(model.forward).parameters.values():
        names = [parameter.name]
        if parameter.kind is _POSITIONALS:
            names = list(takewhile(left.__contains__, (f"{parameter.name}_{i}" for i in range(len(left)))))
        elif parameter.kind in (inspect.Parameter.KEYWORD_ONLY, _KEYWORDS) or parameter.name not in left:
            break
        args += map(left.pop, names)
    return tuple(args), left


@dataclass(frozen=True)
class BoundCall:
    """The parts of a call.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments, in the order of forward's signature.
        parameters: The parameters' description for the manifest.
        names: The tensors' names.
        tensors: The tensors in the order of torch's pytrees, which the compiled code uses too.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[Parameter, ...]
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]

    def with_tensors(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) of the same call with other tensors."""
        replacement = iter(tensors)
        args, kwargs = tree_map(lambda leaf: next(replacement) if is_tensor(leaf) else leaf, (self.args, self.kwargs))
        return args, kwargs


def describe_call(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
    """Splits a call into its parts."""
    look_into_dataclasses((args, dict(kwargs)))
    arguments = bind_call(model, args, kwargs)
    positional = list(arguments)[: len(args)]
    ordered = {name: value for name, value in arguments.items() if name not in positional}
    parameters: list[Parameter] = []
    tensors: list[torch.Tensor] = []
    found: list[str] = []
    for name, value in arguments.items():
        check_name(name, f"a parameter of {type(model).__name__}.forward")
        node, leaves = flatten(value, is_tensor, start=len(tensors), where=f"parameter `{name}`")
        tensors.extend(leaves)
        found.extend(names(node, name))
        parameters.append(Parameter(name=name, kind="positional" if name in positional else "keyword", value=node))
    if not tensors:
        raise UsageError("the example inputs contain no tensor", hint="A compiled model takes at least one.")
    return BoundCall(tuple(args), ordered, tuple(parameters), tuple(found), tuple(tensors))


@contextmanager
def plain_tuples(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Makes the model's call plain, and yields the arguments for it: plain tuples, each argument with its own name.

    A saved program names the classes of its structures, and torch can read it only if they are registered. The manifest
    has the names and fields, so the program does not need them. `forward` is replaced on the object: a module around it
    would change the names of its parameters.
    """
    _, structure = tree_flatten((args, dict(kwargs)))
    forward = model.forward

    @functools.wraps(forward)
    def plain_forward(*plain_args: Any, **plain_kwargs: Any) -> Any:
        named_args, named_kwargs = tree_unflatten(tree_leaves((plain_args, plain_kwargs)), structure)
        return plain(forward(*named_args, **named_kwargs))

    given = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in bind_call(model, args, kwargs)]
    plain_forward.__dict__["__signature__"] = inspect.Signature(given)
    plain_forward.__dict__.pop(DYNAMIC_SPEC, None)  # torch.export gets the sizes themselves
    with with_forward(model, plain_forward):
        yield plain(args), plain(dict(kwargs))


@contextmanager
def with_forward(model: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces a module's forward while the block runs."""
    before = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        if before is not None:
            model.forward = before
        else:
            del model.forward
