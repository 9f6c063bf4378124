"""Lets code compute what the weights alone decide when it is loaded, and again for other weights.

AOTInductor calls this constant folding at run time. It would fold all that it can: here a change of the graph says
what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.graph import getattr_recursive
from torch.fx import Graph, GraphModule, Node

from exportkit.export.torch_patches.patched import Function, all_patched

_FOLDING = "aot_inductor.use_runtime_constant_folding"


@contextmanager
def computed_at_load(change: Callable[[Graph], set[Node]], applies: Callable[[Graph], bool]) -> Iterator[None]:
    """Lets `change` change graphs while the block runs. It returns the nodes that are to be computed at load."""
    ours = False  # whether nobody else asked for constant folding

    def decide(graph: Graph) -> None:  # is called for the whole graph last, after its branches and bodies
        nonlocal ours
        ours = ours or not config.aot_inductor.use_runtime_constant_folding
        if ours:
            config.aot_inductor.use_runtime_constant_folding = applies(graph)

    def changing(
        split: Function, module: GraphModule, *args: Any, skip_folding_node_fn: Any = None, **kwargs: Any
    ) -> Any:
        computed = change(module.graph)
        module.recompile()

        def skip(node: Node) -> bool:
            others = ours and node.op != "get_attr" and node not in computed
            return others or bool(skip_folding_node_fn and skip_folding_node_fn(node))

        return split(module, *args, skip_folding_node_fn=skip, **kwargs)

    def writing_small_ones(get_attr: Function, graph: Any, target: str, *args: Any, **kwargs: Any) -> Any:
        # Asked to fold constants, Inductor would read single numbers and short vectors from outside of the code.
        value = getattr_recursive(graph.module, target)
        short = isinstance(value, torch.Tensor) and value.dim() <= 1 and not target.startswith("_FOLDED_CONST_")
        with config.patch({_FOLDING: False}) if ours and short else nullcontext():
            return get_attr(graph, target, *args, **kwargs)

    changes = all_patched(("compile_fx.split_const_gm", changing), ("GraphLowering.get_attr", writing_small_ones))
    with config.patch({_FOLDING: False, "post_grad_custom_post_pass": decide}), changes:
        yield
