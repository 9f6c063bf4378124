"""The layout of an operator: what its tensors and numbers must be, written once.

It gives the checks and the results of the fake kernel, the dimensions that may vary at export, and the documentation;
`drawn_refusals` draws from it the calls that must be refused. The words of the checks are those of
csrc/arr_coc/common/checks.h. `tensor_layout` describes how a tensor is written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from exportkit.operators.contract.tensor_layout import Dim, Shape, TensorLayout

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOATING_NAMES = "float32, float64, float16 or bfloat16"

_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {">": operator.gt, ">=": operator.ge}


def check(holds: Any, *parts: Any) -> None:
    """Raises RuntimeError, as a kernel does, unless `holds`, which may be symbolic. Only then parts are formatted."""
    if holds is not True:  # which spares the usual case a call
        torch._check(holds, lambda: "".join(_text(part) for part in parts))


def _text(part: Any) -> str:
    """Formats a part of a message as C++ does."""
    if isinstance(part, torch.Size):
        return "[" + ", ".join(str(size) for size in part) + "]"
    if isinstance(part, torch.dtype):
        return str(part).removeprefix("torch.")
    return f"{part:g}" if isinstance(part, float) else str(part)


@dataclass(frozen=True)
class Layout:
    """The tensors and numbers of an operator.

    Attributes:
        inputs: The tensor arguments in the order in which the kernel checks them. The others have the dtype of the
            first, unless they say another, and its device.
        outputs: The results. Or a function of the arguments, by name, that returns empty results.
        least: Symbol -> its smallest size.
        numbers: Number argument -> what holds for it, "> 0" or ">= 1" or the like.
        derived: Symbol -> what else has this size, and how it is computed: ("the grid of patches",
            "(H/patch_size) * (W/patch_size)"). A division must have no remainder.
        further: Checks that the other fields do not express. It gets the operator's name, and the arguments by name.
        after: Operator -> its layout, for operators whose kernels check the arguments first, under their names.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Sequence[str] | Callable[..., Any] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    further: Callable[..., None] | None = None
    after: Mapping[str, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reads every part, so that a mistake shows at once, as a ValueError."""
        if isinstance(self.outputs, str):
            raise ValueError(f"outputs must be a list, such as [{self.outputs!r}], and not a string")
        inputs = {name: text for _, layout in self.chain("") for name, text in layout.tensors.items()}
        for name, text in self.tensors.items():
            if not text.shapes or text.like or text.flag:
                raise ValueError(
                    f"{self.inputs[name]!r} is the layout of a result; an input has its own shape and dtype"
                )
        for result in self.results:
            if len(result.shapes) > 1 or result.of or result.dtype == "floating":
                raise ValueError(f"'{result}' is the layout of an input; a result has one shape and one dtype")
        named = [name for text in [*self.tensors.values(), *self.results] for name in text.named()]
        if unknown := next((name for name in named if name not in inputs), None):
            raise ValueError(f"the layout names {unknown!r}, which is not one of its inputs: {', '.join(inputs)}")
        symbols = {dim.text for text in inputs.values() for shape in text.shapes for dim in shape.dims}
        if unknown := next((name for name in [*self.least, *self.derived] if name not in symbols), None):
            raise ValueError(f"the layout has a rule for {unknown!r}, which is not a size of its inputs")
        for name, rule in self.numbers.items():
            if not re.fullmatch(r"(>|>=) -?\d+", rule):
                raise ValueError(f"{rule!r} is not a rule for {name}; write such as '> 0' or '>= 1'")

    @cached_property
    def tensors(self) -> dict[str, TensorLayout]:
        """The inputs by name."""
        return {name: TensorLayout.parse(text) for name, text in self.inputs.items()}

    @cached_property
    def results(self) -> tuple[TensorLayout, ...]:
        """The outputs; none if a function makes them."""
        return () if callable(self.outputs) else tuple(map(TensorLayout.parse, self.outputs))

    def chain(self, op: str) -> Iterator[tuple[str, Layout]]:
        """Yields the layouts to check, this one last, each with the name of its operator."""
        yield from self.after.items()
        yield op, self

    def check(self, op: str, arguments: Mapping[str, Any]) -> _Call:
        """Checks the arguments of a call, by name; sizes may be symbolic. A RuntimeError begins with `op`."""
        call = _Call(arguments)
        for name, layout in self.chain(op):
            _Checks(name, layout, call).run()
        return call

    def fake(self, op: str, arguments: Mapping[str, Any]) -> Any:
        """Checks the arguments of a call as `check` does, and returns its results, empty."""
        call = self.check(op, arguments)
        if callable(self.outputs):
            return self.outputs(**arguments)
        made = tuple(call.empty(op, result) for result in self.results)
        return made if len(made) > 1 else made[0] if made else None

    def dynamic(self, arguments: Mapping[str, Any]) -> dict[str, dict[int, str]]:
        """Returns the symbols of the dimensions that may vary, by argument, for tensors of these ranks.

        Those that `...` stands for are called B, for the batch, `before1` and so on.
        """
        found: dict[str, dict[int, str]] = {}
        for _, layout in self.chain(""):
            for name, text in layout.tensors.items():
                if arguments[name] is not None and (shape := text.shape_of(arguments[name])) is not None:
                    of = f"{name}_" if shape.anything else ""
                    count = len(shape.before(arguments[name]))
                    dims = {place: f"{of}before{place}" if place else f"{of}B" for place in range(count)}
                    last = shape.last(arguments[name])
                    found[name] = dims | {place: dim.text for dim, place, _ in last if dim.is_named}
        return {name: dims for name, dims in found.items() if dims}

    def describe(self) -> str:
        """Returns the layout as a line for a reader."""
        inputs: dict[str, str] = {}
        rules: list[str] = []
        for _, layout in self.chain(""):
            inputs |= {name: str(text) for name, text in layout.tensors.items()}
            rules += (f"{symbol} >= {least}" for symbol, least in layout.least.items())
            rules += (f"{name} {rule}" for name, rule in layout.numbers.items())
            rules += (f"{symbol} = {expression}" for symbol, (_, expression) in layout.derived.items())
        alike = {text: ", ".join(n for n, other in inputs.items() if other == text) for text in inputs.values()}
        line = "; ".join(f"{names} {text}" for text, names in alike.items())
        line += " -> " + ", ".join(map(str, self.results)) if self.results else ""
        return line + (", where " + ", ".join(dict.fromkeys(rules)) if rules else "")


@dataclass
class _Call:
    """A call, and what the tensors that were checked have fixed."""

    arguments: Mapping[str, Any]
    first: str = ""
    sizes: dict[str, tuple[str, Any]] = field(default_factory=dict)  # by symbol: the first tensor that has it, its size
    before: tuple[str, Shape] | None = None  # the first tensor with `...`

    def value(self, op: str, expression: str) -> Any:
        """Computes an expression of sizes and number arguments. A division must have no remainder."""
        return self._value(op, ast.parse(expression, mode="eval").body)

    def _value(self, op: str, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                if name not in self.sizes and name not in self.arguments:
                    raise ValueError(f"{op}: the layout names {name!r}, which is neither a size nor an argument")
                return self.sizes[name][1] if name in self.sizes else self.arguments[name]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self._value(op, left) * self._value(op, right)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                whole, part = self._value(op, left), self._value(op, right)
                of, by = ast.unparse(left), ast.unparse(right)
                check(whole % part == 0, op, f": {of} = ", whole, f" is not a multiple of {by} = ", part)
                return whole // part
        raise ValueError(f"{ast.unparse(node)!r} is not made of names, numbers, * and /")

    def dtype(self, name: str) -> torch.dtype:
        if name == "accumulated":
            return torch.float64 if self.arguments[self.first].dtype == torch.float64 else torch.float32
        return getattr(torch, name)

    def empty(self, op: str, result: TensorLayout) -> Tensor:
        base = self.arguments[result.like or self.first]
        dtype = base.dtype if result.like or result.dtype is None else self.dtype(result.dtype)
        if result.flag and not self.arguments[result.flag]:
            return base.new_empty(0, dtype=dtype)
        if not result.shapes:
            return base.new_empty(base.shape)
        sizes = [self.value(op, dim.text) for dim in result.shapes[0].dims]
        if result.shapes[0].more and self.before is not None:
            name, shape = self.before
            sizes = [*shape.before(self.arguments[name]), *sizes]
        return base.new_empty(sizes, dtype=dtype)


@dataclass(frozen=True)
class _Checks:
    op: str
    layout: Layout
    call: _Call

    def run(self) -> None:
        """Checks the tensors, then the numbers, then what is computed from both."""
        layout, arguments = self.layout, self.call.arguments
        for name, text in layout.tensors.items():
            if arguments[name] is not None:
                self.tensor(name, text)
        for name, rule in layout.numbers.items():
            compare, bound = rule.split()
            self.must(_COMPARE[compare](arguments[name], int(bound)), f"{name} must be {rule}, got ", arguments[name])
        for symbol, (what, expression) in layout.derived.items():
            self.same_size(symbol, *self.call.sizes[symbol], what, self.call.value(self.op, expression))
        if layout.further is not None:
            layout.further(self.op, **arguments)

    def must(self, holds: Any, *parts: Any) -> None:
        check(holds, self.op, ": ", *parts)

    def tensor(self, name: str, text: TensorLayout) -> None:
        given: Tensor = self.call.arguments[name]
        shape = text.shape_of(given)
        wrong_shape = (f"{name} must be ", *self.allowed(text), ", got shape ", given.shape)
        self.owners(name, text)
        self.must(shape is not None, *wrong_shape)
        assert shape is not None  # for the type checker
        self.dtype_and_device(name, text)
        if shape.more and not shape.anything:
            self.before(name, shape, wrong_shape if text.of else None)
        for dim, _, size in shape.last(given):
            if dim.fixed is not None:
                self.must(size == dim.fixed, *wrong_shape)
                continue
            if (least := self.layout.least.get(dim.text)) is not None:
                too_small = (f"{name} must have {dim.text} >= {least}, got shape ", given.shape)
                self.must(size >= least, *(wrong_shape if shape.more else too_small))
            other, expected = self.expected(name, dim, size)
            if text.of:
                self.must(size == expected, *wrong_shape)
            elif expected is not size:
                self.same_size(dim.text, name, size, other, expected)

    def allowed(self, text: TensorLayout) -> tuple[Any, ...]:
        """Returns parts of a message: the shapes that a tensor may have."""
        shapes = " or ".join(map(str, text.shapes))
        if text.of:
            return shapes, f" of {text.of} ", self.call.arguments[text.of].shape
        for dim in (dim.text for shape in text.shapes if shape.more for dim in shape.dims):
            shapes += f" with {dim} >= {self.layout.least[dim]}" if dim in self.layout.least else ""
        return (shapes,)

    def owners(self, name: str, text: TensorLayout) -> None:
        """Refuses a tensor whose sizes are those of another shape of another tensor, such as a mask without tokens."""
        for symbol, owner in (dim for shape in text.shapes for dim in shape.dims):
            if owner is not None:
                given = self.call.arguments[owner]
                shapes = [shape for shape in self.layout.tensors[owner].shapes if Dim(symbol) in shape.dims]
                needs = f"{name} needs a {owner} " + " or ".join(map(str, shapes))
                has_it = any(shape.has_rank(given.dim()) for shape in shapes)
                self.must(has_it, needs, f", got {owner} of shape ", given.shape)

    def dtype_and_device(self, name: str, text: TensorLayout) -> None:
        self.call.first = self.call.first or name
        first = self.call.first
        given, base = self.call.arguments[name], self.call.arguments[first]
        if text.dtype == "floating" or name == first:
            self.must(given.dtype in FLOATING, f"{name} must be {FLOATING_NAMES}, got ", given.dtype)
        elif text.dtype is None:
            differ = (f"{name} is ", given.dtype, f", {first} is ", base.dtype, "; they must have one dtype")
            self.must(given.dtype == base.dtype, *differ)
        else:
            expected = self.call.dtype(text.dtype)
            self.must(given.dtype == expected, f"{name} must be ", expected, ", got ", given.dtype)
        self.must(given.device == base.device, f"{name} and {first} must be on one device")

    def before(self, name: str, shape: Shape, wrong_shape: tuple[Any, ...] | None) -> None:
        """Compares the dimensions that `...` stands for, and the whole shape if the first tensor's is written alike."""
        if self.call.before is None:
            self.call.before = name, shape
        other, others = self.call.before
        given, first = self.call.arguments[name], self.call.arguments[other]
        differ = (f"{name} has shape ", given.shape, f", {other} has shape ", first.shape, "; they must be equal")
        whole = shape == others
        sizes, expected = (given.shape, first.shape) if whole else (shape.before(given), others.before(first))
        self.must(len(sizes) == len(expected), *(wrong_shape or differ))
        for size, wanted in zip(sizes, expected):
            if other != name:
                self.must(size == wanted, *(wrong_shape or differ))

    def expected(self, name: str, dim: Dim, size: Any) -> tuple[str, Any]:
        """Returns the size that a dimension must have, and a tensor that has it."""
        if dim.owner is None:
            return self.call.sizes.setdefault(dim.text, (name, size))
        owner = self.call.arguments[dim.owner]
        shape = self.layout.tensors[dim.owner].shape_of(owner)
        assert shape is not None, f"{dim.owner} was checked before {name}"
        return dim.owner, next(size for theirs, _, size in shape.last(owner) if theirs.text == dim.text)

    def same_size(self, symbol: str, name: str, size: Any, other: str, expected: Any) -> None:
        sizes = (f"{name} has {symbol} = ", size, f", {other} has {symbol} = ", expected)
        self.must(size == expected, *sizes, "; they must be equal")
