"""Lets the C++ around kernels refuse a value with an error of its own (see `refusing_code`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import NullKernelHandler, V
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from exportkit.export.sizes.shapes import expression_of
from exportkit.export.torch_patches.patched import Function
from exportkit.package.compiled_with import REFUSED


def selecting_in_range(write: Function, wrapper: Any, node: Any, clamp: Any) -> None:
    """Lets `x[i.item()]` fail on the host, where Inductor computes an address from any index."""
    write(wrapper, node, clamp)
    if clamp:  # where a slice begins, which may be anywhere
        return
    index, size = f"{node.unbacked_offset_symbol}_index", wrapper.val_to_arg_str_for_prim_type(node.size, int)
    failure = f'throw std::out_of_range("{REFUSED}index " + std::to_string({index}) + " is out of range");'
    wrapper.writeline(f"if ({index} < 0 || {index} >= {size}) {{ {failure} }}")


def refusing_scalars(write: Function, node: Any, wrapper: Any) -> None:
    """Lets assertions about sizes and about numbers, which the host makes, say that they refuse a value."""
    write(node, _Refusing(wrapper))


class _Refusing(NamedTuple):
    wrapper: Any

    def writeline(self, line: str) -> None:
        self.wrapper.writeline(line.replace('"Expected ', f'"{REFUSED}expected '))


def dividing(write: Function, printer: Any, expression: Any) -> str:
    """Lets the host refuse a size that is divided by a number from data, `n // m.item()`, where that is zero."""
    text: str = write(printer, expression)
    divisor = expression.args[1]
    if not isinstance(V.kernel, NullKernelHandler) or not free_unbacked_symbols(divisor):
        return text
    failure = f'throw std::domain_error("{REFUSED}an integer is divided by zero")'
    return f"(({printer.doprint(divisor)}) != 0 ? {text} : {failure})"


def need_elements(size: sympy.Expr, loops: Sequence[sympy.Expr]) -> None:
    """Lets the host refuse an index into nothing, for which no index would be in range, before loops of a kernel."""
    wrapper = V.graph.wrapper_code
    if wrapper is None or V.graph.sizevars.statically_known_true(size > 0):  # a template is written once before
        return
    size_text, count = (wrapper.codegen_cpp_sizevar(each) for each in (size, sympy.prod(loops)))
    failure = f'throw std::out_of_range("{REFUSED}an index is out of range: its dimension has no element");'
    wrapper.writeline(f"if ({size_text} == 0 && {count} > 0) {{ {failure} }}")


def looking_up_alone(run: Function, graph: GraphLowering, node: torch.fx.Node) -> Any:
    """Gives a lookup in a tensor that may be empty a kernel of its own: its host knows how many indices there are.

    Inside of another one a mask would decide which of them are read, as where `torch.cat` writes several tensors.
    """
    result = run(graph, node)
    if isinstance(result, ir.TensorBox) and _may_find_nothing(node):
        result.realize()
    return result


def _may_find_nothing(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    if not any("ind" in name for name in names):  # index, indices
        return False
    given = [
        each.meta["val"]
        for name, each in zip(names, node.args)
        if isinstance(each, torch.fx.Node) and "ind" not in name
    ]
    sizes = [expression_of(size) for each in given if isinstance(each, torch.Tensor) for size in each.shape]
    return not all(V.graph.sizevars.statically_known_true(size > 0) for size in sizes)


_EXTREMES: dict[Any, str] = {torch.ops.aten.max.default: "max", torch.ops.aten.min.default: "min"}


def reducing_something(run: Function, graph: GraphLowering, node: torch.fx.Node) -> Any:
    """Lets the host refuse the greatest or the least of no elements. torch has such a check where a dimension is named.

    Without it the answer is an infinity.
    """
    result = run(graph, node)
    if name := _EXTREMES.get(node.target):
        given: Any = node.args[0]
        count = sympy.prod(map(expression_of, given.meta["val"].shape))
        if not graph.sizevars.statically_known_true(count > 0):
            refusal = _NoElements(sympy.Ne(count, 0), f"{name}() of no elements")
            graph.register_buffer(refusal, set_name=True)
            graph.register_operation(refusal)
    return result


class _NoElements(ir.AssertScalar):
    def codegen(self, wrapper: Any) -> None:
        holds = wrapper.codegen_cpp_sizevar(self.scalar, simplify=False)
        wrapper.writeline(f'if (!({holds})) {{ throw std::out_of_range("{REFUSED}{self.msg}"); }}')
