"""Runs a traced program, and holds the sizes of each result against those that tracing has described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils._pytree import tree_leaves

from exportkit.export.models.program_model import STATE
from exportkit.export.sizes.shapes import linear_in_one


class OtherSizesError(Exception):
    """A node's result has other sizes than tracing described, so that compiled code would be wrong."""


class DescribedRun(torch.fx.Interpreter):
    """Runs a program, node by node."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__(program.module(check_guards=False))
        self._sizes: dict[sympy.Expr, sympy.Expr] = {}
        self._symbols: dict[sympy.Symbol, sympy.Integer] = {}

    def results(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns the tensors of the program's result. It writes into the state.

        Raises:
            OtherSizesError: A node's result has other sizes than described.
        """
        self._sizes, self._symbols = {}, {}
        given = tree_leaves((args, {**kwargs, **({STATE: tuple(state)} if state else {})}))
        return [t for t in tree_leaves(self.run(*given, enable_io_processing=False)) if isinstance(t, torch.Tensor)]

    def run_node(self, n: torch.fx.Node) -> Any:
        """Runs a node."""
        result = super().run_node(n)
        for described, tensor in zip(tree_leaves(n.meta.get("val")), tree_leaves(result)):
            if not (isinstance(described, torch.Tensor) and isinstance(tensor, torch.Tensor)):
                continue
            if n.op == "placeholder":
                self._learn(described, tensor)
            elif described.ndim != tensor.ndim or any(map(self._differs, described.shape, tensor.shape)):
                raise OtherSizesError(f"{n.target} answers {list(tensor.shape)} for {list(described.shape)}")
        return result

    def _learn(self, described: torch.Tensor, tensor: torch.Tensor) -> None:
        for size, actual in zip(described.shape, tensor.shape):
            if isinstance(size, torch.SymInt) and (linear := linear_in_one(size.node.expr)):
                symbol, scale, offset = linear
                self._symbols.setdefault(symbol, sympy.Integer((actual - offset) // scale))

    def _differs(self, described: int | torch.SymInt, actual: int) -> bool:
        """Returns whether a size is another than described. One that data decides may be any."""
        if not isinstance(described, torch.SymInt):
            return described != actual
        expression = described.node.expr
        if expression not in self._sizes:
            self._sizes[expression] = expression.xreplace(self._symbols)
        size = self._sizes[expression]
        return bool(size.is_Integer) and int(size) != actual
