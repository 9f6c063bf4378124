"""Changes how Inductor writes code, while a program is compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import sympy
import torch
from torch._inductor import config, ir, lowering
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.codegen.cpp import CppKernel, CppVecKernel
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP, cexpr_index
from torch._inductor.index_propagation import IndexPropagation, TypedExpr
from torch._inductor.pattern_matcher import FailedMatch
from torch._inductor.virtualized import V
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._sympy.functions import FloorDiv, ModularIndexing
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import bound_sympy

from exportkit.export.compile.cascade_sums import cascade_sums
from exportkit.export.compile.operator_calls import operator_calls
from exportkit.export.compile.reduction_tiling import reduction_tiling
from exportkit.export.models.program_model import graphs_of
from exportkit.export.models.source_lines import where_listed
from exportkit.export.torch_patches.needed_nodes import viewed
from exportkit.export.torch_patches.opaque import without_opaque
from exportkit.export.torch_patches.patched import Function, all_patched, patched
from exportkit.libraries import TORCH_NAMESPACES
from exportkit.progress import note, notes

_LOOP_THREADS = 8  # with which Inductor decides how many loops are divided among threads


@contextmanager
def changed_inductor() -> Iterator[None]:
    """Makes all changes while the block runs."""
    changes = all_patched(
        ("sizevars.join_dimensions", _whole_rows),
        ("CppKernel.decide_parallel_depth", _divided_loops),
        ("torch.get_num_threads", _never_one_thread),
        ("cpp_flex_attention_template.parallel_num_threads", _room_for_every_thread),
        ("CppMicroGemmFP32Vec.TEMPLATE_KERNEL", _keys_that_are_there),
        ("CppVecKernel.store", _sums_at_one_place),
        ("IndexPropagation.propagate_sympy", _positions_that_wrap),
        ("DynamicSliceSize.__init__", _slices_with_two_ends),
        ("Conditional.create", _operands_as_traced),
        ("Switch.create", _operands_as_traced_by_switch),
        ("post_grad.remove_noop_ops", _values_before_writes),
        ("_TargetArgsExpr._match", _no_factor_dropped),
        ("pad_mm.is_mm_compute_bound", _padding_by_hints),
        ("_filelock.FileLock", _no_wait_for_others),
        *([("Interpreter.run_node", _noting)] if notes() else []),
    )
    with changes, cascade_sums(), reduction_tiling(), _kernels_of_libraries(), operators_as_called(), operator_calls():
        yield


def taken_apart(operator: object, into: Function) -> AbstractContextManager[None]:
    """Lets a function take an operator apart while the block runs; where it returns NotImplemented, it stays whole."""
    return patched("compile_fx.select_decomp_table", lambda select: {**select(), operator: into})


_place = functools.lru_cache(maxsize=1000)(where_listed)


def _noting(run: Function, interpreter: torch.fx.Interpreter, node: torch.fx.Node) -> Any:
    """Notes each node of a graph before torch runs, folds or lowers it."""
    if node.op == "call_function":
        where = _place(node.meta.get("stack_trace") or "")
        note("", f"{node.target}{' of ' + where if where else ''}")
    return run(interpreter, node)


def _whole_rows(join: Function, index: sympy.Expr) -> sympy.Expr:
    """Lets Inductor see that `n * (i // n) + i % n` is `i` where n is a sum, such as an image's gh * gw + 1 tokens.

    It looks for one term `n * (i // n)`. But it multiplies products out, so that there is one for each term of n. It
    then takes rows that lie one after the other for rows with gaps, and copies the input of a matrix product.
    """
    index = join(index)
    for rest in sorted(index.atoms(ModularIndexing), key=sympy.default_sort_key):
        base, divisor, size = rest.args
        quotient, scale = FloorDiv(base, divisor * size), index.coeff(rest)
        if size.is_Add and scale != 0 and sympy.expand(index.coeff(quotient) - scale * size) == 0:
            others = sympy.expand(index - scale * (rest + size * quotient))
            return _whole_rows(join, others + scale * FloorDiv(base, divisor))
    return index


def _padding_by_hints(bound: Function, *sizes: Any) -> Any:
    """Lets Inductor decide whether it pads a product without a condition on the product's sizes.

    torch 2.11 asks `K > M` of a product in bfloat16, and takes the answer for the example for granted at all sizes.
    """
    return bound(*(size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes))


def _divided_loops(decide: Function, kernel: CppKernel, deepest: Any, threads: int) -> Any:
    """Lets the threads of a CPU share more loops than the one over the batch.

    Inductor joins outer loops until the example's sizes occupy the threads of the machine that compiles. With two
    threads and an example of two samples this is the loop over the batch, and a batch of one would run on one thread
    on every machine. With one number for all machines, all write the same code.
    """
    return decide(kernel, deepest, threads if config.cpp.threads > 0 else _LOOP_THREADS)


def _never_one_thread(count: Function) -> int:
    """Lets a machine of one thread write the code that others write.

    For one thread, Inductor lets each thread of a parallel region do what one of them should. With more threads where
    it runs, such code counts `count += 1` several times.
    """
    return max(int(count()), 2)


class _ThreadsAtRunTime(int):
    """A number of threads that is written into code as the number there will be."""

    def __str__(self) -> str:
        return "at::get_num_threads()"


def _room_for_every_thread(count: Function) -> int:
    """Lets attention with a function (flex_attention) have memory for each thread that runs it.

    Inductor writes the number of threads of the machine that compiles. With more, a package would write beyond it.
    """
    return _ThreadsAtRunTime(count())


_EIGHT_KEYS = "N % Vectorized::size() == 0 && 24"


def _keys_that_are_there(template: str) -> str:
    """Lets attention with a function (flex_attention) read and write the last keys of a block, and none after them.

    With vectors of eight, Inductor takes 8 last keys for 16. It reads memory after the keys, and writes their scores
    over the greatest scores of other rows, or after its memory.
    """
    return template.replace(_EIGHT_KEYS, "N == BLOCK_N && 24")


def _sums_at_one_place(
    store: Function, kernel: CppVecKernel, name: str, index: sympy.Expr, value: Any, mode: Any = None
) -> None:
    """Lets a vector be added to one element, as `index_add` does where its target has one column.

    Inductor adds a vector to as many elements as it has, and fails in an assertion where its index is one number.
    """
    place = kernel.rename_indexing(index)
    varying = kernel.itervars[kernel.tiling_idx]
    if mode != "atomic_add" or kernel._try_get_const_stride(place, varying) != 0:
        store(kernel, name, index, value, mode)
        return
    target, count = kernel.args.output(name), cexpr_index(kernel.num_elems)
    kept = f"std::array<{DTYPE_TO_CPP[V.graph.get_dtype(name)]}, {kernel.tiling_factor}> each; "
    given = value if value.is_vec else kernel.broadcast(value)
    added = f"for (long i = 0; i < {count}; ++i) atomic_add(&{target}[{cexpr_index(place)}], each[i]);"
    kernel.stores.writeline(DeferredLine(name, f"{{ {kept}{given}.store(each.data(), {count}); {added} }}"))


def _positions_that_wrap(propagate: Function, handler: IndexPropagation, name: str, args: Any, kwargs: Any) -> Any:
    """Lets what is computed from a position wrap, as in `arange(n, dtype=torch.int32) * 10 ** 9`, and round.

    Inductor computes with positions as with numbers that have no limits, whatever their dtype.
    """
    found = propagate(handler, name, args, kwargs)
    kept = not found.is_symbolic or _holds_all(found.value, dict(handler.var_to_range))
    return found if kept else handler.fallback(name, args, kwargs)


def _holds_all(value: TypedExpr, ranges: dict[sympy.Symbol, Any]) -> bool:
    """Returns whether a dtype has all values of an expression; int64 those of sizes that are declared without end."""
    if value.is_constant() or value.dtype is torch.bool:
        return True
    found = bound_sympy(sympy.sympify(value.expr), ranges)
    if value.dtype.is_floating_point:
        greatest = 2 / torch.finfo(value.dtype).eps
        return bool(-greatest <= found.lower and found.upper <= greatest)
    limits = torch.iinfo(value.dtype)
    endless = value.dtype is torch.int64 and {int_oo, -int_oo} & {found.lower, found.upper}
    return bool(endless) or bool(limits.min <= found.lower and found.upper <= limits.max)


def _slices_with_two_ends(make: Function, slice_: Any, symbol: Any, start: Any, end: Any, step: Any, size: Any) -> None:
    """Gives a slice that begins or ends at a value, `x[: n.item()]`, its other end.

    torch writes `None` into the C++ code there, which does not compile. torch 2.11 writes the end of
    `x[n.item() :]` as 2 ** 63, which is negative in C++, so that the slice is empty.
    """
    open_ended = end is None or (isinstance(end, int | sympy.Integer) and end >= sys.maxsize)
    make(slice_, symbol, 0 if start is None else start, size if open_ended else end, step, size)


def _operands_as_traced(
    create: Function, cls: type, predicate: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any]
) -> Any:
    """Gives the branches of torch.cond operands with the strides that tracing saw.

    Inductor lowers branches for those. A LayerNorm of a transposed tensor, for one, writes other strides itself.
    """
    return create(cls, predicate, true_fn, false_fn, _strided_as_traced(operands))


def _operands_as_traced_by_switch(
    create: Function, cls: type, selector: Any, branches: Any, operands: Sequence[Any], is_cond: bool = False
) -> Any:
    """Does the same where torch.cond is a torch.switch of two branches."""
    return create(cls, selector, branches, _strided_as_traced(operands), is_cond)


def _strided_as_traced(operands: Sequence[Any]) -> list[Any]:
    nodes: Any = V.graph.current_node.args[-1]
    traced = [each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in nodes]
    return [
        ir.ExternKernel.require_exact_strides(given, value.stride()) if isinstance(value, torch.Tensor) else given
        for given, value in zip(operands, traced, strict=True)
    ]


def operators_as_called() -> AbstractContextManager[None]:
    """Lets the code call the operators that the model calls, not their overloads with the tag `out`.

    torch 2.13 calls those, with a function of C that only its own operators have, and does not compile.
    """
    return patched("_out_variant.to_out_variant", lambda _, operator: None)


def opaque_operators_stay_whole() -> AbstractContextManager[None]:
    """Lets Inductor take no operator apart that `opaque_operators` keeps whole.

    torch has them in both tables if their library was loaded before Inductor. 2.11 looks into the second, too.
    """
    return all_patched(
        ("compile_fx.select_decomp_table", lambda select: without_opaque(select())),
        ("lowering.decompositions", without_opaque),
    )


@contextmanager
def _kernels_of_libraries() -> Iterator[None]:
    """Lets the code call the operators of libraries that taught Inductor what to write in their place.

    That calls functions of the library, and a loader opens libraries so that nothing else finds their functions.
    """
    taught: dict[Any, Function] = {
        operator: write
        for operator, write in lowering.lowerings.items()
        if isinstance(operator, torch._ops.OpOverload)
        and operator.namespace not in TORCH_NAMESPACES
        and operator not in lowering.fallbacks
    }
    for operator in taught:
        del lowering.lowerings[operator]
    try:
        yield
    finally:
        lowering.lowerings.update(taught)
        lowering.fallbacks.difference_update(taught)


def _values_before_writes(remove: Function, graph: torch.fx.Graph) -> None:
    """Copies, before all writes, each tensor that is written into another one after it was written itself.

    A program writes its results at its end, one after the other. Inductor removes a clone whose form is that of what it
    copies: of `new, old = f(new), new`, the tensor `old` would then get what `new` has become.
    """
    remove(graph)
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written: set[torch.fx.Node] = set()
    for write in writes:
        to, value = write.args[:2]
        if isinstance(value, torch.fx.Node) and viewed(value) in written:
            with graph.inserting_before(writes[0]):
                kept = graph.call_function(torch.ops.aten.clone.default, (value,))
            kept.meta = dict(value.meta)
            write.update_arg(1, kept)
        written.add(viewed(to))


def _no_factor_dropped(match: Function, pattern: Any, node: Any, context: Any) -> Any:
    """Matches no node with a factor that the pattern does not name: `add(mm(a, b), c, alpha=0.5)` is no `addmm`."""
    factors = ("alpha", "beta", "value")
    if isinstance(node, torch.fx.Node) and any(
        name in factors and name not in pattern.kwargs and factor != 1 for name, factor in node.kwargs.items()
    ):
        return FailedMatch("a factor: node={}, pattern={}", node, pattern)
    return match(pattern, node, context)


_ATTENTION = (
    torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten.softmax.int,  # which Inductor looks for, with the products around it
    torch.ops.aten._softmax.default,
)


def attention_of_any_length(program: torch.export.ExportedProgram) -> AbstractContextManager[None]:
    """Lets attention be products of matrices while the block runs, if a size of its inputs may be 0 in a program.

    On a CPU, the kernel of torch's fast attention divides by the length of its sequences.
    """
    may_be_empty = any(
        _may_be_0(size, program)
        for part in graphs_of(program.graph_module)
        for node in part.graph.nodes
        if node.target in _ATTENTION
        for each in node.all_input_nodes
        for size in each.meta["val"].shape
    )
    return sdpa_kernel(SDPBackend.MATH) if may_be_empty else nullcontext()


def _may_be_0(size: int | torch.SymInt, program: torch.export.ExportedProgram) -> bool:
    if not isinstance(size, torch.SymInt):
        return size == 0
    ranges = program.range_constraints
    least = {
        symbol: ranges[symbol].lower if symbol in ranges else sympy.Integer(0) for symbol in size.node.expr.free_symbols
    }
    return size.node.expr.xreplace(least) == 0


MODEL_LOCK = "model.lock"  # by the name that every generated file has, which aot_inductor.py sets


def _no_wait_for_others(lock: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets exports compile at the same time.

    Inductor locks by the name of what it generates. All exports of a user would wait for one another, and fail after
    ten minutes, though each has a folder of its own.
    """
    return nullcontext() if Path(path).name == MODEL_LOCK else lock(path, *args, **kwargs)
