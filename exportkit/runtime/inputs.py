"""Checks the arguments of a call and flattens them to the tensors that compiled code takes.

Compiled code checks almost nothing: a wrong dtype makes it read beyond its tensors, a size outside the exported range
gives wrong numbers, and a fake tensor ends the process. So every call is checked here first. The checks add to the time
of every call, so they are planned once per model.
"""

from __future__ import annotations

import difflib
import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from exportkit.errors import InputError
from exportkit.package import manifest as m
from exportkit.package.structure import builder, call_text, fields_of, names, parts_of
from exportkit.runtime.requests import joined_shapes
from exportkit.sizes import shape_text

# torch's CUDA kernels may read 16 bytes at a time from the start of an input, and code for a CPU reads elements at
# multiples of their size. An input that begins elsewhere is copied.
_CUDA_ALIGNMENT = 16

# torch sees elements as larger ones, such as pairs of floats as complex numbers, only where they begin a multiple of
# the larger size behind the start of their storage. An input that begins elsewhere is copied, but for written ones.
_LARGEST_ELEMENT = 16

# Looking up shapes that passed before is faster than checking them, and most processes use only a few shapes.
REMEMBERED_SHAPES = 1024

_Take = Callable[[Any, list[Any]], None]

Fixed = tuple[tuple[str, int], ...]  # numbers of dimensions, which a session has


class InputPlan:
    """The input checks of one package on one device, and the structure of its result.

    The plan is made before any code is loaded, because a manifest may describe a structure that Python cannot make.
    `signature` is for inspect.signature, help() and editors; `written` has the places of the inputs that the call
    writes.
    """

    def __init__(self, call: m.Call, device: torch.device, *, reason: str = "where the model is") -> None:
        """Plans the checks of inputs that must all be on a device. `reason` says in messages why they are there."""
        self.device = device
        self._reason = reason
        self.build_result = builder(call.result)
        self._names = [parameter.name for parameter in call.parameters]
        self._positional = [p.name for p in call.parameters if p.kind == "positional"]
        self._fixed = _fixed_values(call.parameters)
        self._takes = [_taker(parameter.value, f"`{parameter.name}`") for parameter in call.parameters]
        self._dimensions = {dimension.name: dimension for dimension in call.dimensions}
        least = _CUDA_ALIGNMENT if device.type == "cuda" else 1
        self._inputs = [_Input(tensor, least) for tensor in call.inputs]
        self.written = tuple(place for place, tensor in enumerate(call.inputs) if tensor.written is not None)
        self._allowed_shapes: set[tuple[Any, ...]] = set()
        self.signature = _signature(call.parameters)
        self._call_text = call_text(call.parameters)

    def prepare(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], fixed: Fixed | None = None
    ) -> list[torch.Tensor]:
        """Returns the flat, contiguous inputs of one call, which its session may fix sizes of.

        Those that it writes are the caller's own. InputError names an input that the package does not allow, its value
        and what is allowed.
        """
        by_position = not kwargs and len(args) == len(self._names) == len(self._positional)
        flat: list[Any] = []
        for take, value in zip(self._takes, args if by_position else self._bind(args, kwargs)):
            take(value, flat)
        return self.prepare_flat(flat, fixed)

    def prepare_requests(self, requests: Sequence[Sequence[Any]]) -> list[list[torch.Tensor]]:
        """Returns the flat, contiguous inputs of several requests, which are to run in one call."""
        if not requests:
            raise InputError("no request was given", hint="Give at least one.")
        prepared = [self.prepare_flat(list(request)) for request in requests]
        if len(prepared) > 1:
            for tensor, expected in zip(prepared[0], self._inputs):
                if not tensor.dim():
                    raise InputError(f"{expected} is a scalar, so requests cannot be joined", hint="Run each alone.")
            self.check_shapes(joined_shapes(prepared))
        return prepared

    def prepare_flat(self, flat: list[Any], fixed: Fixed | None = None) -> list[torch.Tensor]:
        """Returns flat inputs, contiguous. Changes the list. Raises the errors of `prepare`."""
        if len(flat) != len(self._inputs):
            raise InputError(f"{len(flat)} tensors were given; the package takes {len(self._inputs)}: {self}")
        given = list(flat) if self.written else flat  # what is written must not overlap what is copied below
        shapes, device = [], self.device
        for index, (value, expected) in enumerate(zip(flat, self._inputs)):
            if type(value) is not torch.Tensor:
                flat[index] = value = _plain_tensor(value, expected)
            own = value
            try:
                shape, address = value.shape, value.data_ptr()
            except RuntimeError as error:  # sparse, nested, or from torch.func's transforms and tracing
                said = f"{expected} must be a dense tensor with data of its own, got "
                if value.is_nested or value.layout is not torch.strided:
                    got = "a nested one" if value.is_nested else f"one of the layout {value.layout}"
                    how = "to_padded_tensor(0.0)" if value.is_nested else "to_dense()"
                    raise InputError(said + got, hint=f"`.{how}` makes such a tensor.") from error
                raise InputError(
                    said + "one of torch.func's transforms or of tracing",
                    hint="Under such a transform, as vmap, a tensor has no data: call the model outside of it.",
                ) from error
            if value.dtype is not expected.dtype or value.device != device or (not address and value.numel()):
                self._refuse_kind(value, expected)
            contiguous, begin = value.is_contiguous(), value.storage_offset() * expected.item_bytes
            needed = value.nbytes + begin if contiguous else _bytes_needed(value)
            if needed > value.untyped_storage().nbytes():
                self._refuse_storage(value, expected)
            # Such views flip a sign when they are read; compiled code would ignore that.
            if value.is_neg() or (expected.is_complex and value.is_conj()):
                flat[index] = value = value.resolve_neg().resolve_conj()
            if not contiguous:
                flat[index] = value.contiguous()
            elif address % expected.alignment or (begin % _LARGEST_ELEMENT and not expected.is_written):
                flat[index] = value.clone()
            shapes.append(shape)
            if expected.is_written and flat[index] is not own:
                self._refuse_layout(expected, own, contiguous=contiguous)
        self.check_shapes(shapes, fixed)
        if self.written:
            self._check_written(given)
        return flat

    def check_shapes(self, shapes: Sequence[Sequence[int]], fixed: Fixed | None = None) -> None:
        """Checks the shapes of flat inputs, in the manifest's order, and the sizes that a session fixes."""
        key = (*shapes, fixed)
        if key not in self._allowed_shapes:
            self._check_new_shapes(shapes, fixed)
            if len(self._allowed_shapes) >= REMEMBERED_SHAPES:
                self._allowed_shapes.clear()
            self._allowed_shapes.add(key)

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Returns the parameters' values in order when some were given by name, or not at all: what is fixed."""
        if len(args) > len(self._positional):
            said = f"{len(args)} positional arguments were given; the package takes {len(self._positional)}: {self}"
            raise InputError(said, hint=self._how_to_call())
        if unknown := [name for name in kwargs if name not in self._names]:
            close = difflib.get_close_matches(unknown[0], self._names, 1)
            meant = f"Did you mean `{close[0]}`? " if close else ""
            raise InputError(
                f"the package has no parameter `{unknown[0]}`: {self}", hint=f"{meant}{self._how_to_call()}"
            )
        given = dict(zip(self._positional, args))
        if twice := [name for name in kwargs if name in given]:
            raise InputError(f"`{twice[0]}` was given twice, by position and by name: {self}")
        given = {**self._fixed, **given, **kwargs}
        if missing := [name for name in self._names if name not in given]:
            raise InputError(f"`{missing[0]}` was not given: {self}", hint=f"Call it as {self._call_text}.")
        return [given[name] for name in self._names]

    def _how_to_call(self) -> str:
        return (
            f"Call it as {self._call_text}. A parameter that the example call of the export left out cannot be given: "
            "Export again with it among the inputs."
        )

    def _check_new_shapes(self, shapes: Sequence[Sequence[int]], fixed: Fixed | None) -> None:
        # Dimension -> its number, and what gave it.
        bound = {name: (number, "the session") for name, number in fixed or ()}
        for shape, expected in zip(shapes, self._inputs):
            sizes = expected.tensor.shape
            if len(shape) != len(sizes):
                said = f"{expected} must have {len(sizes)} dimensions, got shape {list(shape)}"
                raise InputError(said, hint=f"It takes {shape_text(sizes)}.")
            for axis, (given, size) in enumerate(zip(shape, sizes)):
                if isinstance(size, m.Size):
                    self._bind_size(shape, axis, expected, bound)
                elif given != size:
                    said = f"{expected} must have size {size} in dimension {axis}, got shape {list(shape)}"
                    raise InputError(said, hint=f"It takes {shape_text(sizes)}.")

    def _bind_size(self, shape: Sequence[int], axis: int, expected: _Input, bound: dict[str, tuple[int, str]]) -> None:
        """Checks a dynamic size against its range and against earlier inputs with the same dimension."""
        size = expected.tensor.shape[axis]
        assert isinstance(size, m.Size)
        dimension = self._dimensions[size.dimension]
        number = size.number_of(shape[axis])
        if number is None or not dimension.min <= number <= dimension.max:
            low, high = (size.at({size.dimension: end}) for end in (dimension.min, dimension.max))
            steps = f", in steps of {size.scale}" if size.scale > 1 else ""
            raise InputError(
                f"{expected} must have a size from {low} to {high}{steps} in dimension {axis} ({size}), "
                f"got shape {list(shape)}",
                hint="Export with another range (--dynamic) where the model should take it.",
            )
        known, source = bound.setdefault(size.dimension, (number, str(expected)))
        if known != number:
            raise InputError(
                f"{expected} has {size.dimension} = {number} by dimension {axis} of shape {list(shape)}, "
                f"but {source} has {size.dimension} = {known}: they must agree"
            )

    def _check_written(self, given: Sequence[Any]) -> None:
        """Checks that the inputs that the call writes are the caller's alone: no gradients, no other input."""
        tensors = [(str(expected), tensor) for expected, tensor in zip(self._inputs, given)]
        for place in self.written:
            name, tensor = tensors[place]
            if tensor.requires_grad:
                raise InputError(
                    f"{name} requires gradients, and the call writes into it", hint="Give its `.detach()`."
                )
            others = Spans([(name, tensor)])
            for other, beside in tensors[:place] + tensors[place + 1 :]:
                if others.overlapping(beside):
                    said = f"{name} shares memory with {other}, and the call writes into {name}"
                    raise InputError(said, hint="`.clone()` one of them.")

    def _refuse_layout(self, expected: _Input, value: torch.Tensor, *, contiguous: bool) -> NoReturn:
        if contiguous:
            problem = f"must begin at a multiple of {expected.alignment} bytes and be no lazy conjugate or negative"
        else:
            problem = f"must be contiguous, got strides {list(value.stride())}"
        said = f"{expected} {problem}, because the call writes into it"
        raise InputError(said, hint="`.clone(memory_format=torch.contiguous_format)` makes such a tensor.")

    def _refuse_kind(self, value: torch.Tensor, expected: _Input) -> NoReturn:
        if value.dtype is not expected.dtype:
            wanted = str(expected.dtype).removeprefix("torch.")
            said = f"{expected} must be {wanted}, got {str(value.dtype).removeprefix('torch.')}"
            raise InputError(said, hint=f"`.to(torch.{wanted})` converts it.")
        if value.device != self.device:
            said = f"{expected} must be on {self.device}, {self._reason}; got one on {value.device}"
            raise InputError(said, hint=f"`.to({str(self.device)!r})` moves it.")
        raise InputError(f"{expected} has no data: its storage was freed, or it only stands in for a tensor")

    def _refuse_storage(self, value: torch.Tensor, expected: _Input) -> NoReturn:
        needed, there = _bytes_needed(value), value.untyped_storage().nbytes()
        said = f"{expected} needs {needed} bytes of its storage, which has {there}: it was resized since it was made"
        raise InputError(said, hint="`.clone()` it before its storage is resized.")

    def __str__(self) -> str:
        """The parameters' names, for messages."""
        return f"({', '.join(self._names)})"


class _Input:
    """One flat input, with the attributes that every call needs."""

    __slots__ = ("alignment", "dtype", "is_complex", "is_written", "item_bytes", "name", "tensor")

    def __init__(self, tensor: m.TensorInput, alignment: int) -> None:
        self.tensor = tensor
        self.name = tensor.name
        self.dtype: torch.dtype = getattr(torch, tensor.dtype)
        self.is_complex = self.dtype.is_complex
        self.item_bytes = self.dtype.itemsize
        self.alignment = max(alignment, self.item_bytes)
        self.is_written = tensor.written is not None

    def __str__(self) -> str:
        return f"`{self.name}`"


def _bytes_needed(value: torch.Tensor) -> int:
    """Returns the bytes from the start of the storage to the end of the last element."""
    if not value.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return int(value.storage_offset() + last + 1) * value.itemsize


def describe_tensor(tensor: m.TensorInput) -> str:
    """Returns such as "image: float32[batch, 3, 16*gh, 16*gw]"."""
    return f"{tensor.name}: {tensor.dtype}{shape_text(tensor.shape)}"


def _signature(parameters: Sequence[m.Parameter]) -> inspect.Signature:
    """Returns the signature of the call. Parameters given by keyword at export are keyword-only.

    What is fixed has a default, but before a positional parameter that must be given, where Python allows none.
    """
    kinds = {"positional": inspect.Parameter.POSITIONAL_OR_KEYWORD, "keyword": inspect.Parameter.KEYWORD_ONLY}
    fixed, found = _fixed_values(parameters), []
    ordered = sorted(parameters, key=lambda parameter: parameter.kind == "keyword")
    needed = max((i for i, p in enumerate(ordered) if p.kind == "positional" and p.name not in fixed), default=-1)
    for place, parameter in enumerate(ordered):
        default = fixed.get(parameter.name, inspect.Parameter.empty) if place > needed else inspect.Parameter.empty
        found.append(inspect.Parameter(parameter.name, kinds[parameter.kind], default=default))
    return inspect.Signature(found)


def _fixed_values(parameters: Sequence[m.Parameter]) -> dict[str, Any]:
    """Returns the values of the parameters without tensors, which were fixed at export and may be left out."""
    return {p.name: builder(p.value)(()) for p in parameters if not names(p.value, p.name)}


def _plain_tensor(value: Any, expected: _Input) -> torch.Tensor:
    """Converts a subclass that only adds methods, such as nn.Parameter, to a plain tensor."""
    if not isinstance(value, torch.Tensor):
        hint = "`torch.from_numpy` makes one." if type(value).__module__ == "numpy" else None
        if isinstance(value, (list, tuple)) and value and all(isinstance(each, torch.Tensor) for each in value):
            hint = "`torch.stack` makes one of several."
        raise InputError(f"{expected} must be a tensor, got {_kind(value)}", hint=hint)
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InputError(f"{expected} must be a plain tensor, got {_kind(value)}, which has no data")
    return value.as_subclass(torch.Tensor)


# --- nested values ----------------------------------------------------------------------------------------------------


def _taker(node: m.Node, path: str) -> _Take:
    """Returns a function that checks the structure of a value and appends its tensors to the flat list."""
    if isinstance(node, m.TensorNode):
        return lambda value, flat: flat.append(value)
    if isinstance(node, m.ConstantNode):
        return _constant_taker(node.value, path)
    keys: Sequence[Any] = node.keys if isinstance(node, m.MappingNode) else range(len(node.items))
    fields = node.fields if isinstance(node, m.NamedTupleNode) else None
    paths = [f"{path}[{key!r}]" if fields is None else f"{path}.{fields[key]}" for key in keys]
    takes = [(key, _taker(item, path)) for key, path, item in zip(keys, paths, node.items)]

    def take(value: Any, flat: list[Any]) -> None:
        _check_container(value, node, path)
        items = value if fields is None else parts_of(value)
        for key, part in takes:
            part(items[key], flat)

    return take


def _constant_taker(constant: bool | int | float | str | None, path: str) -> _Take:
    def take(value: Any, flat: list[Any]) -> None:
        # True, 1 and 1.0 are different here, because a model may treat them differently.
        same_kind = isinstance(value, type(constant)) and isinstance(value, bool) == isinstance(constant, bool)
        if not (same_kind and value == constant):
            shown = _kind(value) if isinstance(value, torch.Tensor) else repr(value)
            said = f"{path} was fixed at export: it must be {constant!r}, got {shown}"
            raise InputError(said, hint="Export again with the other value, or with a tensor instead.")

    return take


def _check_container(value: Any, node: m.SequenceNode | m.MappingNode | m.NamedTupleNode, path: str) -> None:
    if isinstance(node, m.SequenceNode):
        kind = list if node.kind == "list" else tuple
        if type(value) is not kind or len(value) != len(node.items):
            given = f"one of {len(value)}" if type(value) is kind else _kind(value)
            raise InputError(f"{path} must be a {kind.__name__} of {len(node.items)}, got {given}")
    elif isinstance(node, m.MappingNode):
        if not isinstance(value, dict):
            raise InputError(f"{path} must be a dict with the keys {_listed(node.keys)}, got {_kind(value)}")
        if value.keys() != set(node.keys):
            raise InputError(f"{path} must have the keys {_listed(node.keys)}, got {_listed(value)}")
    # This process may lack the model's class, so only the fields are compared.
    elif fields_of(value) != node.fields:
        said = f"{path} must be a named tuple or a dataclass with the fields {_listed(node.fields)}, got {_kind(value)}"
        raise InputError(said, hint=f"collections.namedtuple({node.class_name!r}, {list(node.fields)}) makes one.")


def _listed(names: Sequence[str] | Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor's first byte and of the end of its last; both are 0 if it has no elements."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (int(last) + 1) * tensor.itemsize


class Spans:
    """The memory of tensors that do not overlap one another."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the tensors with their names."""
        found = sorted((*span(tensor), name) for name, tensor in tensors if tensor.numel())
        self._starts = [start for start, _, _ in found]
        self._ends = [end for _, end, _ in found]
        self._names = [name for _, _, name in found]

    def overlapping(self, tensor: torch.Tensor) -> str | None:
        """Returns the name of a tensor that shares memory with this one; None if there is none."""
        start, end = span(tensor)
        # The last one that begins before this one's end is the only one of those that can reach into it.
        place = bisect_right(self._starts, end - 1) - 1
        return self._names[place] if end and place >= 0 and self._ends[place] > start else None
