"""Keeps what a tensor was until it is written into another one.

A program writes its results at its end, one after the other. Inductor removes a clone whose form is that of what it
copies: of `new, old = f(new), new`, the tensor `old` would then get what `new` has become.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from exportkit.export.torch_patches.needed_nodes import viewed
from exportkit.export.torch_patches.patched import Function, patched

_aten = torch.ops.aten


def values_before_writes() -> AbstractContextManager[None]:
    """Makes the change while the block runs."""
    return patched("post_grad.remove_noop_ops", _then_kept)


def _then_kept(remove: Function, graph: torch.fx.Graph) -> None:
    """Copies, before all writes, each tensor that is written into another one after it was written itself."""
    remove(graph)
    writes = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    written: set[torch.fx.Node] = set()
    for write in writes:
        to, value = write.args[:2]
        if isinstance(value, torch.fx.Node) and viewed(value) in written:
            with graph.inserting_before(writes[0]):
                kept = graph.call_function(_aten.clone.default, (value,))
            kept.meta = dict(value.meta)
            write.update_arg(1, kept)
        written.add(viewed(to))
