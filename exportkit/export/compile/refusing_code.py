"""Lets compiled code refuse a value without ending the process (docs/adr/0074).

Inductor asserts that an index is in range. A failed assertion ends the process where threads share a loop, and on a
GPU it ends the CUDA context. Here the code writes down which assertion failed, in memory that it gets with each call,
and goes on with an index that is in range. Who called it looks there afterwards. The same serves divisions of integers
by zero, which end a process, too, and the assertions that models write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import sympy
import torch
from torch._guards import detect_fake_mode
from torch._inductor import index_propagation
from torch._inductor.codegen import common, cpp, triton
from torch._inductor.utils import sympy_index_symbol
from torch._inductor.virtualized import NullHandler, V
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_structure

from exportkit.export.compile.refusable_values import DIVISIONS, bounds_of, constant_indices, refuse_in_attention
from exportkit.export.compile.refusing_host_code import (
    dividing,
    looking_up_alone,
    need_elements,
    reducing_something,
    refusing_scalars,
    selecting_in_range,
)
from exportkit.export.models.source_lines import where_listed
from exportkit.export.torch_patches.patched import Function, all_patched
from exportkit.package.compiled_with import MOST_PLACES, REFUSED_LENGTH, REFUSED_PLACES

INPUT = "exportkit_refused"

_DIVISIONS = frozenset({"floordiv", "truncdiv", "remainder", "mod"})
_LIKELY = {
    "index": ("index", "gather", "scatter", "embedding", "select", "take", "put", "nll_loss"),
    "division": DIVISIONS,
    "assertion": ("assert",),
}
_WITHOUT_NEGATIVE = (
    "gather",
    "scatter",
    "index_select",
    "index_add",
    "index_copy",
    "index_reduce",
    "embedding",
    "nll_loss",
)
"""Operators whose eager kernels refuse negative indices, which Inductor may count from the end."""


class RefusesValuesError(Exception):
    """Code that refuses a value was to be written for a program that has no memory for it."""


def writing_refusals(writing: RefusingCode) -> AbstractContextManager[None]:
    """Lets Inductor write code that refuses values while the block runs.

    Raises:
        RefusesValuesError: It would be needed, and the program was given no memory for them.
    """
    return all_patched(
        ("CSEProxy.indirect_indexing", writing._in_range),
        ("CSEProxy.load", writing._known),
        ("CSEProxy._default", writing._divided),
        ("CSEProxy.device_assert_async", writing._asserted),
        ("IndexPropagation.indirect_indexing", _as_values),
        ("Kernel.indirect_assert", writing._noted),
        ("CppVecKernel.indirect_assert", writing._noted),
        ("CppFlexAttentionTemplate.modification", writing._modifying),
        ("TritonTemplateKernel.modification", writing._modifying),
        ("ModificationWrapper.indirect_indexing", writing._modification_in_range),
        ("TritonKernel.inductor_meta_common", _without_debugging),
        ("CppWrapperCpu.generate_end", writing._with_places),
        ("CppWrapperCpu.codegen_dynamic_select_index", selecting_in_range),
        ("AssertScalar.codegen", refusing_scalars),
        ("GraphLowering.run_node", looking_up_alone),
        ("GraphLowering.run_node", reducing_something),
        ("CppPrinter._print_FloorDiv", dividing),
        ("CppPrinter._print_PythonMod", dividing),
    )


class RefusingCode:
    """The places of a program where its code refuses a value: what is written into the code for each."""

    def __init__(self, program: torch.export.ExportedProgram, device: torch.device) -> None:
        """Makes the list for a program on a device."""
        self.places: list[tuple[str, str]] = []
        self._device = device
        self._constants = {name: bounds_of(value) for name, value in constant_indices(program).items()}
        self._has_memory = False
        self._kind, self._size = "index", ""
        self._modification: Any = None

    def add_input(self, module: torch.fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Gives a program's module one more input, the memory for what is refused. Returns its keyword arguments."""
        self._has_memory = True
        graph = module.graph
        holders = graph.find_nodes(op="placeholder")
        with graph.inserting_after(holders[-1]) if holders else graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(INPUT)
        mode = detect_fake_mode([holder.meta.get("val") for holder in holders])
        with mode or nullcontext():
            example = node.meta["val"] = self._zeros()
        refuse_in_attention(module, node, self._constants)
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):  # else the GPU is not here
            example = self._zeros()
        kwargs = {**kwargs, INPUT: example}
        codegen: Any = graph._codegen
        info = codegen.pytree_info
        codegen.pytree_info = info._replace(
            orig_args=[*info.orig_args, INPUT], in_spec=tree_structure((tuple(args), kwargs))
        )
        module.recompile()
        return kwargs

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(REFUSED_LENGTH, dtype=torch.int64, device=self._device)

    def _in_range(
        self, index: Function, proxy: Any, var: Any, size: Any, check: bool = True, wrap_neg: bool = True
    ) -> sympy.Symbol:
        """Checks an index, and brings it into range."""
        size = sympy.sympify(size)
        wrap_neg = wrap_neg and not _all_come_from(_WITHOUT_NEGATIVE)
        check = check or _all_come_from(("masked_scatter",))  # its source may have too few elements
        with self._checking("index" if not wrap_neg else "index from both ends", size):
            symbol = index(proxy, var, size, check, wrap_neg)
            value = proxy.kernel.cse.varname_map[symbol.name]
            bounds = value.bounds if wrap_neg else var.bounds
            not_negative, less = bounds.lower >= 0, size.is_number and bounds.upper < size
            if not common.generate_assert(check) or (not_negative and less):
                return symbol
            if value.bounds != bounds:  # torch 2.11 takes a negative index for one that counts from the end
                proxy.kernel.check_bounds(symbol, size, not not_negative, not less)
        need_elements(size, self._loops(proxy.kernel))
        if getattr(value, "is_vec", True):
            last = proxy.index_expr(size - 1, torch.int64)
            within = proxy.maximum(proxy.minimum(_as_int64(proxy, value), last), proxy.constant(0, torch.int64))
        else:
            within = _chosen(proxy, value, size, not_negative, less)
        return proxy.parent_handler.indirect_indexing(within, size, False)

    def _divided(self, default: Function, proxy: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Divides integers by 1 where they would be divided by 0, and by -1 without the one quotient that overflows."""
        if name in _DIVISIONS and not args[1].dtype.is_floating_point and _may_be_zero():
            value, divisor = args
            zero, one, minus_one = (proxy.constant(number, divisor.dtype) for number in (0, 1, -1))
            self._require(proxy, proxy.ne(divisor, zero), "division")
            divisor = proxy.where(proxy.eq(divisor, zero), one, divisor)
            if divisor.dtype.is_signed:
                negative = proxy.eq(divisor, minus_one)
                value = proxy.where(negative, proxy.neg(value), value)
                divisor = proxy.where(negative, one, divisor)
            args = (value, divisor)
        return default(proxy, name, args, kwargs)

    def _asserted(self, _: Function, proxy: Any, condition: Any, message: str) -> None:
        plain = "".join(letter if letter.isprintable() else " " for letter in message)
        self._require(proxy, condition, f"assertion {' '.join(plain.split())}")

    def _known(self, load: Function, proxy: Any, name: str, index: sympy.Expr) -> Any:
        """Needs no check of constants whose values are in range."""
        value = load(proxy, name, index)
        if bounds := self._constants.get(V.graph.allocated_constant_name.get(name, "")):
            value.bounds = bounds
        return value

    def _require(self, proxy: Any, condition: Any, kind: str) -> None:
        """Checks a condition as an index that is in range where it holds."""
        index = proxy.where(condition, proxy.constant(0, torch.int64), proxy.constant(-1, torch.int64))
        symbol = proxy.parent_handler.indirect_indexing(index, sympy.Integer(1), False)
        with self._checking(kind, sympy.Integer(1)):
            proxy.kernel.check_bounds(symbol, sympy.Integer(1), True, False)

    @contextmanager
    def _checking(self, kind: str, size: sympy.Expr) -> Iterator[None]:
        before = self._kind, self._size
        self._kind, self._size = kind, V.kernel.index_to_str(size)
        try:
            yield
        finally:
            self._kind, self._size = before

    def _noted(
        self, check: Function, kernel: Any, var: Any, lower: str | None, upper: str | None, mask: Any = None
    ) -> str:
        """Writes down in place of asserting."""
        if isinstance(kernel, cpp.CppKernel) and not getattr(var, "is_vec", False):
            mask = None  # C++ comes here only where the mask holds, and its `~` of a bool is always true
        line: str = check(kernel, var, lower, upper, mask)
        begin, end = f"{kernel.assert_function}(", ', "index out of bounds'
        if not line.startswith(begin) or end not in line:
            return line  # a vector's check of one number has noted it
        if V.graph.is_const_graph:
            return line  # what follows from the weights alone has no call that could refuse it
        holds = line[len(begin) : line.rindex(end)]
        if self._modification is not None:
            memory = f"const_cast<int64_t*>({kernel.args.input_buffers[_memory()]})"
        else:
            memory = kernel.args.output(_memory())
        if isinstance(kernel, triton.TritonKernel):
            return self._stored(memory, holds, var)
        place = 1 + 2 * self._place()
        value = _found(kernel, var, self._size, mask) if self._kind.startswith("index") else "0"
        size = f"{self._size} + 1" if value else f"-({self._size} + 1)"
        numbers = ((0, "1"), (place, value or "0"), (place + 1, size))
        written = " ".join(  # not by an atomic store, after which the compiler would load everything again
            f"*static_cast<volatile int64_t*>({memory} + {at}) = static_cast<int64_t>({number});"
            for at, number in numbers
        )
        return f"if (C10_UNLIKELY(!({holds}))) {{ {written} }}"

    def _stored(self, memory: str, holds: Any, value: Any) -> str:
        """Returns Triton's code that writes down a value for which a condition does not hold."""
        where, place = f"{memory} + ({holds}).to(tl.int64) * 0", 1 + 2 * self._place()
        written = ((0, "1"), (place, value), (place + 1, f"{self._size} + 1"))
        return "; ".join(f"tl.store({where} + {at}, {number}, ~({holds}))" for at, number in written)

    def _modifying(self, modify: Function, template: Any, *args: Any, **kwargs: Any) -> Any:
        """Knows which attention's `score_mod` or `mask_mod` is written into a template."""
        number = kwargs.get("subgraph_number")  # in Triton's templates
        self._modification = args[0] if number is None else template.subgraphs[number]
        try:
            return modify(template, *args, **kwargs)
        finally:
            self._modification = None

    def _modification_in_range(
        self, _: Function, handler: Any, var: Any, size: Any, check: bool = True, wrap_neg: bool = True
    ) -> sympy.Symbol:
        """Does in a template of Triton what `_in_range` does in its other kernels."""
        size, kernel = sympy.sympify(size), handler.kernel
        if not common.generate_assert(check):
            return sympy_index_symbol(str(var))
        need_elements(size, [])
        write = partial(kernel.cse.generate, kernel.compute, shape=var.shape)
        end = handler._process_indexing(size)
        value = write(f"tl.where({var} < 0, {var} + {end}, {var})", dtype=var.dtype) if wrap_neg else var
        holds = write(f"({value} >= 0) & ({value} < {end})", dtype=torch.bool)
        with self._checking("index from both ends" if wrap_neg else "index", size):
            kernel.compute.writeline(self._stored(kernel.args.input(_memory()), holds, value))
        return sympy_index_symbol(str(write(f"tl.where({holds}, {value}, 0)", dtype=var.dtype)))

    def _loops(self, kernel: Any) -> list[sympy.Expr]:
        if self._modification is not None:
            return []
        if isinstance(kernel, cpp.CppKernel):
            return list(kernel.call_ranges or ())
        return [tree.numel for tree in kernel.range_trees]

    def _place(self) -> int:
        if not self._has_memory:
            raise RefusesValuesError
        place = self._kind, _described(self._kind.partition(" ")[0], self._modification)
        if place not in self.places and len(self.places) < MOST_PLACES:
            self.places.append(place if len(self.places) < MOST_PLACES - 1 else ("", ""))
        return self.places.index(place) if place in self.places else MOST_PLACES - 1

    def _with_places(self, end: Function, wrapper: Any, result: Any) -> None:
        end(wrapper, result)
        if self._has_memory and not V.graph.is_const_graph:
            lines = [str(len(V.graph.graph_inputs) - 1), *(f"{kind}\t{where}" for kind, where in self.places)]
            text = json.dumps("\n".join(lines), ensure_ascii=False)
            result.writeline('extern "C" __attribute__((visibility("default")))')
            result.writeline(f"const char* {REFUSED_PLACES}() {{ return {text}; }}")


def _as_values(
    index: Function, propagation: Any, given: Any, size: Any, check: bool = True, wrap_neg: bool = True
) -> Any:
    """Takes an index that follows from sizes for one that data decides, if it cannot be shown to be in range."""
    if common.generate_assert(check) and isinstance(given, index_propagation.IndexPropVar) and given.is_symbolic:
        value, holds = sympy.sympify(given.value.expr), propagation.statically_true
        if not (holds(value >= 0) or (wrap_neg and holds(-size <= value))) or not holds(value < size):
            return propagation.fallback("indirect_indexing", (given, size, check, wrap_neg), {}).value
    return index(propagation, given, size, check, wrap_neg)


def _without_debugging(meta: Function, cls: type) -> dict[str, Any]:
    """Lets Triton compile no assertions: it would compile its own, against overflow, too."""
    return {**meta(cls), "assert_indirect_indexing": False}


def _chosen(proxy: Any, value: Any, size: sympy.Expr, not_negative: bool, less: bool) -> Any:
    """Returns a number in C++ that is 0 where the check has failed. The compiler joins the two, so it costs nothing."""
    number = _as_int64(proxy, value)
    checks = [
        *([] if not_negative else [f"(0 <= {number})"]),
        *([] if less else [f"({number} < {V.kernel.index_to_str(size)})"]),
    ]
    chosen = proxy.kernel.cse.generate(
        proxy.kernel.compute,
        f"C10_LIKELY({' & '.join(checks)}) ? {number} : int64_t(0)",
        dtype=torch.int64,
        shape=value.shape,
    )
    chosen.update_on_args("where", (number,), {})
    return chosen


def _as_int64(proxy: Any, value: Any) -> Any:
    return value if value.dtype == torch.int64 else proxy.to_dtype(value, torch.int64)


def _may_be_zero() -> bool:
    """Whether the current node of a kernel may divide by 0 or -1. Functions in templates of Triton have no nodes."""
    if isinstance(V.interpreter, NullHandler):
        return False
    node = V.interpreter.current_node
    divisor = node.args[2] if len(node.args) > 2 else None
    if not isinstance(divisor, torch.fx.Node) or divisor.target != "constant":
        return True
    return divisor.args[1] in (0, -1)


def _found(kernel: Any, var: Any, size: str, mask: Any) -> str:
    """Returns the C++ expression of the value that is refused; "" if only some lanes of a vector count."""
    if not getattr(var, "is_vec", False):
        return str(var)
    if mask:
        return ""
    count = cpp.cexpr_index(getattr(kernel, "tail_size", None) or sympy.Integer(kernel.tiling_factor))
    kind = cpp.DTYPE_TO_CPP[var.dtype]
    return (
        f"[&] {{ __at_align__ std::array<{kind}, {kernel.tiling_factor}> lanes; {var}.store(lanes.data(), {count}); "
        f"return *std::find_if(lanes.begin(), lanes.begin() + {count} - 1, "
        f"[&](auto lane) {{ return lane < 0 || lane >= {size}; }}); }}()"
    )


def _memory() -> str:
    """Returns the name of the input for what is refused, also in the graph of a branch or a loop."""
    graph: Any = V.graph
    while (parent := getattr(graph, "parent", None)) is not None:
        graph = parent
    name = next(reversed(graph.graph_inputs))
    if graph is not V.graph:
        V.graph.name_to_buffer.setdefault(name, graph.graph_inputs[name])
    return str(name)


def _operators(kind: str, written: Any = None) -> dict[torch.fx.Node, str]:
    """Returns the operators of the current kernel that may refuse a value of this kind; all if none looks like one."""
    node = written or getattr(V.kernel.current_node, "node", None)
    origins = [origin for origin in getattr(node, "origins", ()) if origin.op == "call_function"]
    named = {origin: str(origin.meta.get("original_aten") or origin.target) for origin in origins}
    words = ("flex_attention",) if written else _LIKELY.get(kind, ())
    likely = {node: name for node, name in named.items() if any(word in name for word in words)}
    return likely or named


def _all_come_from(words: Sequence[str]) -> bool:
    """Whether all operators of the current kernel that have indices are some of these."""
    named = _operators("index").values()
    return bool(named) and all(any(word in name for word in words) for name in named)


def _described(kind: str, written: Any) -> str:
    """Returns such operators with their lines: "aten.embedding.default at model.py:3 in forward"."""
    found = []
    for node, name in _operators(kind, written).items():
        line = where_listed(node.meta.get("stack_trace") or "").partition(": `")[0]
        found.append(f"{name} at {line}" if line else name)
    return " or ".join(list(dict.fromkeys(found))[:2])
