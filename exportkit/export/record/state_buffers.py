"""Finds the buffers and parameters that are state: what methods write and what outlives a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.errors import UsageError
from exportkit.export.models.method_specs import matches
from exportkit.spec import ExportSpec


@dataclass(frozen=True)
class StateBuffer:
    """A buffer or a parameter that is state.

    Attributes:
        name: Its first name in the model.
        aliases: Its other names there, of tied tensors.
        initial: What a new session begins with, in a copy without gaps. Where the first axis is a dimension, one row.
        dimension: The dimension that is its first axis, or None.
        exported: The size of the first axis in the model, if that is a dimension.
        requires_grad: Whether a method may ask for its gradient.
    """

    name: str
    aliases: tuple[str, ...]
    initial: torch.Tensor
    dimension: str | None = None
    exported: int = 1
    requires_grad: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return (self.name, *self.aliases)

    def at(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """Returns a new tensor for a session of these sizes. A size that is not given is the model's own."""
        if self.dimension is None:
            return own_copy(self.initial, self.requires_grad)
        rows = sizes.get(self.dimension, self.exported)
        return own_copy(self.initial.expand(rows, *self.initial.shape[1:]), self.requires_grad)


def own_copy(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Returns a copy without gaps, which no gradient passes."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(requires_grad)


def state_buffers(spec: ExportSpec) -> tuple[StateBuffer, ...]:
    """Returns the buffers and parameters that a spec's patterns match, in the order of the model.

    Raises:
        UsageError: A pattern matches nothing. What it matches shares memory with another tensor of the model, or its
            rows, of which a session may have any number, do not begin alike.
    """
    patterns = spec.state_dimensions
    if not patterns:
        return ()
    model = spec.model
    tensors = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    dimensions: dict[int, str | None] = {}
    for pattern, dimension in patterns.items():
        matched = [n for n in tensors if matches(n, [pattern])]
        if not matched:
            raise UsageError(
                f"--state {pattern} matches no buffer or parameter of {type(model).__name__}",
                hint=f"It has {', '.join(tensors)}."
                if tensors
                else "It has none: self.register_buffer(name, tensor) makes one.",
            )
        for name in matched:
            if dimensions.setdefault(id(tensors[name]), dimension) != dimension:
                raise UsageError(
                    f"two patterns of the state give the first axis of {name} to `{dimension}` and to "
                    f"`{dimensions[id(tensors[name])]}`"
                )
    found = [
        _buffer(tuple(names[number]), tensors[names[number][0]], dimensions[number])
        for number in names
        if number in dimensions
    ]
    _check_memory(model, {name for each in found for name in each.names})
    return tuple(found)


def _buffer(names: tuple[str, ...], tensor: torch.Tensor, dimension: str | None) -> StateBuffer:
    initial = own_copy(tensor, requires_grad=False)
    if dimension is None:
        return StateBuffer(names[0], names[1:], initial, requires_grad=tensor.requires_grad)
    if not initial.dim() or not initial.shape[0]:
        raise UsageError(
            f"the state {names[0]} has the shape {list(initial.shape)}, so that its first axis cannot be `{dimension}`",
            hint="Give it a first axis, or leave out the dimension.",
        )
    first = initial[:1].clone()
    same = (initial == first) | ((initial != initial) & (first != first))  # NaN equals NaN
    if not bool(same.all()):
        raise UsageError(
            f"the rows of the state {names[0]} differ, and a session of another `{dimension}` would not know with "
            "which to begin",
            hint="Let all rows begin with the same values, or leave out the dimension.",
        )
    return StateBuffer(names[0], names[1:], first, dimension, initial.shape[0], tensor.requires_grad)


def _check_memory(model: torch.nn.Module, state: set[str]) -> None:
    """Refuses state that shares memory with another tensor of the model: a session has a copy of the state alone."""
    named = {f"buffer {name}": (name, tensor) for name, tensor in model.named_buffers()}
    named |= {f"parameter {name}": (name, tensor) for name, tensor in model.named_parameters()}
    known = [(text, name in state, t) for text, (name, t) in named.items() if t.layout is torch.strided]
    for text, is_state, tensor in known:
        for other_text, _, other in known if is_state else ():
            if other is not tensor and _overlap(tensor, other):
                raise UsageError(
                    f"the state of {text} shares memory with the {other_text}",
                    hint="Give it memory of its own, such as register_buffer(name, tensor.clone()).",
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.numel() or not other.numel():
        return False
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (a, b), (c, d) = _extent(one), _extent(other)
    return a < d and c < b


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextmanager
def holding(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> Iterator[Callable[[str], torch.Tensor | None]]:
    """Puts tensors in the places of buffers and parameters, by name, while the block runs.

    Yields what says, by name, what the model has there now, which the model's code may have replaced.
    """
    places = {name: place_of(model, name) for name in tensors}
    before = {name: held[key] for name, (held, key) in places.items()}
    try:
        for name, (held, key) in places.items():
            held[key] = tensors[name]
        yield lambda name: places[name][0].get(places[name][1])
    finally:
        for name, (held, key) in places.items():
            held[key] = before[name]


def place_of(model: torch.nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Returns where a module keeps a buffer or a parameter, and its name there."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return module._parameters if key in module._parameters else module._buffers, key


def settled(before: torch.Tensor, now: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
    """Returns the tensor that a buffer is after a call, in which the model may have assigned another one to it.

    Raises:
        UsageError: The model has assigned something else than a tensor of the same form, or to one name of several.
    """
    assigned = {name: tensor for name, tensor in now.items() if tensor is not before}
    if not assigned:
        return before
    name, new = next(iter(assigned.items()))
    if len(now) > 1 and (len(assigned) < len(now) or any(tensor is not new for tensor in assigned.values())):
        raise UsageError(
            f"the model assigns a new tensor to the buffer {name}, which is also {', '.join(sorted({*now} - {name}))}",
            hint=f"Write into it instead, so that it stays one buffer: self.{name.rpartition('.')[2]}.copy_(...).",
        )
    if not isinstance(new, torch.Tensor):
        raise UsageError(f"the model assigns a {type(new).__name__} to the buffer {name}, which is state")
    if new.shape != before.shape or new.dtype != before.dtype or new.device != before.device:
        raise UsageError(
            f"the model assigns {_form(new)} to the buffer {name}, which is {_form(before)}: state keeps its form",
            hint="Keep a buffer of the greatest size and a position, or take it as an input and return it.",
        )
    return new


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"
