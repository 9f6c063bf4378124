"""Lays out the same values in memory as callers do: with other strides, from another byte on, each value once.

A loader must take any of these, or refuse it in a sentence. torch is imported where a tensor is laid out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from exportkit.package.case_files import edge_inputs
from exportkit.package.dtypes import ITEM_BYTES
from exportkit.package.manifest import Case, Manifest
from exportkit.sizes import shape_at

if TYPE_CHECKING:
    import torch

MAX_LAID_OUT = 12  # cases of a target that are replayed in another layout
_ALIGNMENT = 64  # bytes
_MAX_BYTES = 256 << 10  # of the inputs of such a case

Layouts = dict[str, tuple[str, ...]]  # by method, the layout of each input


def layouts_of(manifest: Manifest, case: Case, number: int, edge_case: str, *, compiled: bool) -> Layouts:
    """Returns the layouts in which a case is replayed once more; none if its inputs are too large.

    An input that the call writes keeps its own, because it must be contiguous. Each input has another layout in the
    next case; one of a single value is expanded from that. A program gets its inputs as they are, and eager, too, needs
    elements that are aligned.
    """
    found, size = {}, 0
    names = tuple(name for name in LAYOUTS if name != _EXPANDED and (compiled or name != _UNALIGNED))
    even = {name for name, kind in edge_inputs(edge_case).items() if kind in EVEN}
    for call in case.calls:
        inputs = manifest.method(call.method).call.inputs
        size += sum(math.prod(shape_at(each, call.sizes)) * ITEM_BYTES[each.dtype] for each in inputs)
        found[call.method] = tuple(
            "" if each.written is not None else _EXPANDED if each.name in even else names[(number + shift) % len(names)]
            for shift, each in enumerate(inputs)
        )
    return found if 0 < size <= _MAX_BYTES else {}


def label_of_layouts(manifest: Manifest, layouts: Mapping[str, tuple[str, ...]]) -> str:
    """Returns such as "x transposed, y from the second byte"."""
    return ", ".join(
        f"{each.name} {layout}"
        for method, own in layouts.items()
        for each, layout in zip(manifest.method(method).call.inputs, own)
        if layout
    )


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Returns a contiguous tensor's values in a layout of `LAYOUTS`; without one, aligned as torch allocates memory."""
    if layout and tensor.numel():
        return LAYOUTS[layout](tensor)
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else _every_second(tensor)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Puts the second dimension last in memory, as images have their colours."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if tensor.dim() > 2 else _transposed(tensor)


def _every_second(tensor: torch.Tensor) -> torch.Tensor:
    """Puts another value behind each."""
    import torch

    return torch.stack([tensor, tensor.roll(1)], -1)[..., 0]


def _one_element_in(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    flat = tensor.reshape(-1)
    return torch.cat([flat[:1], flat])[1:].view(tensor.shape)


def _one_byte_in(tensor: torch.Tensor) -> torch.Tensor:
    """Puts a tensor of the CPU into memory of somebody else, where its elements are not aligned."""
    import torch

    from exportkit.tensor_bytes import tensor_bytes

    if tensor.device.type != "cpu":
        return _one_element_in(tensor)
    data = tensor_bytes(tensor).numpy().tobytes()
    return torch.frombuffer(bytearray(b"\0" + data), dtype=tensor.dtype, offset=1).view(tensor.shape)


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Keeps one value where all along a dimension are the same bits: strides of 0."""
    import torch

    from exportkit.tensor_bytes import tensor_bytes

    found = tensor
    for dim, size in enumerate(tensor.shape):
        first = found.narrow(dim, 0, 1)
        whole = first.expand(*found.shape[:dim], size, *found.shape[dim + 1 :])
        bits = [tensor_bytes(each) for each in (found, whole)]
        found = first if torch.equal(*bits) else found
    return found.clone().expand(tensor.shape)


_UNALIGNED = "from the second byte"
_EXPANDED = "with strides of 0"
EVEN = ("one value", "nothing", "every place", "the lowest value", "the least value", "the greatest value")
"""The kinds of edge values (`exportkit.export.record.edge_values`) that make all elements of an input the same."""

LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": _transposed,
    "with a step of 2": _every_second,
    _UNALIGNED: _one_byte_in,
    _EXPANDED: _expanded,
    "with the channels last": _channels_last,
    "from the second element": _one_element_in,
}
