"""The layout of an operator: the shapes and dtypes of its tensors, written once.

It gives the checks and the results of the fake kernel, calls that must be refused, the dimensions that may vary at
export, and the documentation. The words of the checks are those of csrc/common/checks.h.

A tensor is written as its dimensions. A name is a size, which is the same wherever the name occurs; a number is a fixed
size; `...` stands for any dimensions before the others, and `*` for any shape. A bar separates alternatives. The dtype
follows a colon:

    "B N D"             the dtype of the first input, which is floating
    "B N D: floating"   any floating dtype
    "B k: int64"        this dtype
    "B D: accumulated"  the dtype that sums are computed in: float64 if the first input is float64, else float32
    "B D | B T D"       one of two shapes
    "query.B T: bool"   B is compared with the B of `query`, and not with the first one
    "B D of features"   errors name the whole shape of `features`, because the tensor was computed from it

Results have two forms more. "like x" is the shape and the dtype of an argument. "like x if need_x" is [0] unless the
argument `need_x` is true. The dimensions of a result may be expressions, such as `H/patch_size`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOATING_NAMES = "float32, float64, float16 or bfloat16"

_TENSOR = re.compile(r"(?P<shapes>[^:]+?)(?: of (?P<of>\w+))?(?:: (?P<dtype>\w+(?: \w+)?))?(?: if (?P<flag>\w+))?")
_BOUND = re.compile(r"(?P<compare>>=|>) (?P<bound>-?\d+)")
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {">": operator.gt, ">=": operator.ge}


def check(holds: Any, *parts: Any) -> None:
    """Raises RuntimeError, as a kernel does, unless `holds`, which may be symbolic.

    Args:
        holds: What must be true.
        *parts: The parts of the message. They are only formatted for a message.
    """
    torch._check(holds, lambda: "".join(_text(part) for part in parts))


def _text(part: Any) -> str:
    """Formats a part of a message as C++ does."""
    if isinstance(part, torch.Size):
        return "[" + ", ".join(str(size) for size in part) + "]"
    if isinstance(part, torch.dtype):
        return str(part).removeprefix("torch.")
    return f"{part:g}" if isinstance(part, float) else str(part)


class Shape(NamedTuple):
    """One shape that a tensor may have: the names or numbers of its last dimensions, and what is before them."""

    dims: tuple[str, ...]
    any_before: bool = False
    unchecked: bool = False

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads "B N D", "... D" or "*"."""
        words = tuple(text.split())
        if words == ("*",):
            return cls((), True, True)
        return cls(words[1:], True) if words[:1] == ("...",) else cls(words)

    def __str__(self) -> str:
        names = [name.rpartition(".")[2] for name in self.dims]
        return "[" + ", ".join(["..."] * self.any_before + names) + "]"

    def has_rank(self, rank: int) -> bool:
        """Returns whether a tensor of this rank may have the shape."""
        return rank >= len(self.dims) if self.any_before else rank == len(self.dims)


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a layout. The module's description has the meaning of the parts."""

    shapes: tuple[Shape, ...]
    dtype: str | None
    of: str | None
    flag: str | None
    like: str | None

    @classmethod
    def parse(cls, text: str) -> TensorLayout:
        """Reads a tensor.

        Raises:
            ValueError: The text cannot be read.
        """
        match = _TENSOR.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not the layout of a tensor; write such as 'B N D' or 'B k: int64'")
        shapes, dtype = match["shapes"], match["dtype"]
        like = next((part[5:] for part in (shapes, dtype or "") if part.startswith("like ")), None)
        alternatives = [] if shapes.startswith("like ") else shapes.split("|")
        return cls(tuple(map(Shape.parse, alternatives)), dtype, match["of"], match["flag"], like)

    def __str__(self) -> str:
        shape = " or ".join(map(str, self.shapes)) or f"like {self.like}"
        shape = "any shape" if shape in ("[...]", "[]") and self.shapes[0].any_before else shape
        return shape + (f", {self.dtype}" if self.dtype else "") + (f", if {self.flag}" if self.flag else "")

    def shape_of(self, tensor: Tensor) -> Shape | None:
        """Returns which of the shapes has the tensor's rank."""
        return next((shape for shape in self.shapes if shape.has_rank(tensor.dim())), None)


@dataclass
class _Seen:
    """What the tensors that were checked have fixed."""

    arguments: Mapping[str, Any]
    first: str = ""
    sizes: dict[str, tuple[str, Any]] = field(default_factory=dict)  # by symbol: a tensor that has it, and the size
    before: tuple[str, Shape] | None = None  # the first tensor with `...`

    @property
    def base(self) -> Tensor:
        return self.arguments[self.first]

    def value(self, name: str) -> Any:
        """Returns a size, or a number among the arguments."""
        return self.sizes[name][1] if name in self.sizes else self.arguments[name]


@dataclass(frozen=True)
class Layout:
    """The tensors and numbers of an operator.

    Attributes:
        inputs: The tensor arguments in the order in which the kernel checks them. The dtype and the device of the first
            are those of the others.
        outputs: The results. Or a function of the arguments, by name, that returns empty results.
        least: The smallest size, by symbol.
        numbers: What holds for a number argument, such as "> 0" or ">= 1".
        derived: Symbol -> what else has this size, and how it is computed: ("the grid of patches",
            "(H/patch_size) * (W/patch_size)"). A division must have no remainder.
        further: Checks that the other fields do not express. It gets the operator's name, and the arguments by name.
        after: Layouts of operators whose kernels check the arguments first, by the operator's name.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Sequence[str] | Callable[..., Any] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    further: Callable[..., None] | None = None
    after: Mapping[str, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reads every tensor, so that a mistake shows at once."""
        _ = self.tensors, self.results
        for name, text in self.numbers.items():
            if not _BOUND.fullmatch(text):
                raise ValueError(f"{text!r} is not a bound of {name}; write such as '> 0' or '>= 1'")

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

    # --- the fake kernel ----------------------------------------------------------------------------------------------

    def check(self, op: str, arguments: Mapping[str, Any]) -> _Seen:
        """Checks the arguments of a call.

        Args:
            op: The operator's name, which errors begin with.
            arguments: Every argument by name. Sizes may be symbolic.

        Raises:
            RuntimeError: An argument is not as it must be.
        """
        seen = _Seen(arguments)
        for name, layout in self.chain(op):
            layout._check_own(name, seen)
        return seen

    def fake(self, op: str, arguments: Mapping[str, Any]) -> Any:
        """Checks the arguments of a call and returns its results, empty.

        Raises:
            RuntimeError: An argument is not as it must be.
        """
        seen = self.check(op, arguments)
        if callable(self.outputs):
            return self.outputs(**arguments)
        made = tuple(_empty(op, result, seen) for result in self.results)
        return made if len(made) > 1 else made[0] if made else None

    def _check_own(self, op: str, seen: _Seen) -> None:
        for name, tensor in self.tensors.items():
            if seen.arguments[name] is not None:
                self._check_tensor(op, name, tensor, seen)
        for name, text in self.numbers.items():
            compare, bound = text.split()
            value = seen.arguments[name]
            check(_COMPARE[compare](value, int(bound)), op, ": ", name, " must be ", text, ", got ", value)
        for symbol, (what, expression) in self.derived.items():
            size = _evaluate(op, ast.parse(expression, mode="eval").body, seen)
            _check_size(op, symbol, *seen.sizes[symbol], what, size)
        if self.further is not None:
            self.further(op, **seen.arguments)

    def _check_tensor(self, op: str, name: str, layout: TensorLayout, seen: _Seen) -> None:
        tensor: Tensor = seen.arguments[name]
        shape = layout.shape_of(tensor)
        self._check_needed(op, name, layout, seen)
        wrong_shape = (op, ": ", name, " must be ", *self._described(layout, seen), ", got shape ", tensor.shape)
        check(shape is not None, *wrong_shape)
        assert shape is not None
        _check_dtype(op, name, layout, seen)
        if shape.unchecked:
            return
        if shape.any_before:
            self._check_before(name, shape, seen, op, wrong_shape if layout.of else None)
        for dim, text in enumerate(shape.dims, -len(shape.dims)):
            owner, _, symbol = text.rpartition(".")
            size = tensor.shape[dim]
            if symbol.isdigit():
                check(size == int(symbol), *wrong_shape)
                continue
            if symbol in self.least:
                least = self.least[symbol]
                with_least = (op, ": ", name, f" must have {symbol} >= {least}, got shape ", tensor.shape)
                check(size >= least, *(wrong_shape if shape.any_before else with_least))
            other, expected = seen.sizes.setdefault(symbol, (name, size))
            if owner:
                other, expected = owner, _size_in(self.tensors[owner], seen.arguments[owner], symbol)
            if other == name:
                continue
            if layout.of:
                check(size == expected, *wrong_shape)
            else:
                _check_size(op, symbol, name, size, other, expected)

    def _described(self, layout: TensorLayout, seen: _Seen) -> tuple[Any, ...]:
        """Returns parts of a message: the shapes that a tensor may have."""
        text = " or ".join(map(str, layout.shapes))
        if layout.of:
            return text, f" of {layout.of} ", seen.arguments[layout.of].shape
        before = [name for shape in layout.shapes if shape.any_before for name in shape.dims]
        return (text + "".join(f" with {name} >= {self.least[name]}" for name in before if name in self.least),)

    def _check_needed(self, op: str, name: str, layout: TensorLayout, seen: _Seen) -> None:
        """Refuses a tensor with a symbol that belongs to another shape of another tensor than the given one."""
        for other, candidate in self.tensors.items():
            if other == name:
                return
            for shape in candidate.shapes if len(candidate.shapes) > 1 else ():
                needed = {dim for own in layout.shapes for dim in own.dims} & set(shape.dims)
                given = seen.arguments[other]
                holds = needed <= seen.sizes.keys()
                check(holds, op, f": {name} needs a {other} {shape}, got {other} of shape ", given.shape)

    def _check_before(self, name: str, shape: Shape, seen: _Seen, op: str, message: tuple[Any, ...] | None) -> None:
        """Checks the dimensions that `...` stands for: they are the same in every tensor."""
        if seen.before is None:
            seen.before = name, shape
        other, other_shape = seen.before
        if other == name:
            return
        tensor, first = seen.arguments[name], seen.arguments[other]
        if message is None:
            message = (op, f": {name} has shape ", tensor.shape, f", {other} has shape ", first.shape)
            message = (*message, "; they must be equal")
        sizes, expected = _before(tensor, shape), _before(first, other_shape)
        check(len(sizes) == len(expected), *message)
        for size, wanted in zip(sizes, expected):
            check(size == wanted, *message)
        if shape == other_shape:
            for size, wanted in zip(tensor.shape, first.shape):
                check(size == wanted, *message)

    # --- what is known without a call ---------------------------------------------------------------------------------

    def dynamic(self, arguments: Mapping[str, Any]) -> dict[str, dict[int, str]]:
        """Returns the symbols of the dimensions that may vary, by argument, for tensors of these ranks."""
        found: dict[str, dict[int, str]] = {}
        for _, layout in self.chain(""):
            for name, tensor in layout.tensors.items():
                given = arguments[name]
                shape = None if given is None else tensor.shape_of(given)
                if shape is None:
                    continue
                count = given.dim() - len(shape.dims)
                before = {dim: f"{name}.{dim}" if shape.unchecked else f"...{dim}" for dim in range(count)}
                named = {count + dim: text.rpartition(".")[2] for dim, text in enumerate(shape.dims)}
                dims = before | {dim: symbol for dim, symbol in named.items() if not symbol.isdigit()}
                if dims:
                    found[name] = dims
        return found

    def describe(self) -> tuple[str, str, str]:
        """Returns the inputs, the outputs and what else must hold, each as a line for a reader."""
        inputs: dict[str, str] = {}
        rules: dict[str, None] = {}
        for _, layout in self.chain(""):
            inputs |= {name: str(tensor) for name, tensor in layout.tensors.items()}
            rules |= dict.fromkeys(f"{symbol} >= {least}" for symbol, least in layout.least.items())
            rules |= dict.fromkeys(f"{name} {text}" for name, text in layout.numbers.items())
            rules |= dict.fromkeys(f"{symbol} = {expression}" for symbol, (_, expression) in layout.derived.items())
        return (
            "; ".join(f"{name} {text}" for name, text in inputs.items()),
            "; ".join(map(str, self.results)),
            ", ".join(rules),
        )


def _before(tensor: Tensor, shape: Shape) -> Sequence[Any]:
    return tensor.shape[: tensor.dim() - len(shape.dims)]


def _size_in(layout: TensorLayout, tensor: Tensor, symbol: str) -> Any:
    shape = layout.shape_of(tensor)
    assert shape is not None
    return tensor.shape[shape.dims.index(symbol) - len(shape.dims)]


def _check_size(op: str, symbol: str, name: str, size: Any, other: str, expected: Any) -> None:
    """Checks that two sizes of the same symbol are equal."""
    sizes = (f"{name} has {symbol} = ", size, f", {other} has {symbol} = ", expected)
    check(size == expected, op, ": ", *sizes, "; they must be equal")


def _check_dtype(op: str, name: str, layout: TensorLayout, seen: _Seen) -> None:
    """Checks the dtype, and that the tensor is on the first one's device."""
    tensor: Tensor = seen.arguments[name]
    seen.first = seen.first or name
    if layout.dtype == "floating" or seen.first == name:
        check(tensor.dtype in FLOATING, op, f": {name} must be {FLOATING_NAMES}, got ", tensor.dtype)
    elif layout.dtype is None:
        found = (f"{name} is ", tensor.dtype, f", {seen.first} is ", seen.base.dtype)
        check(tensor.dtype == seen.base.dtype, op, ": ", *found, "; they must have one dtype")
    else:
        expected = _named_dtype(layout.dtype, seen)
        check(tensor.dtype == expected, op, f": {name} must be ", expected, ", got ", tensor.dtype)
    check(tensor.device == seen.base.device, op, f": {name} and {seen.first} must be on one device")


def _named_dtype(name: str, seen: _Seen) -> torch.dtype:
    if name == "accumulated":
        return torch.float64 if seen.base.dtype == torch.float64 else torch.float32
    return getattr(torch, name)


def _empty(op: str, result: TensorLayout, seen: _Seen) -> Tensor:
    """Makes a result."""
    base = seen.arguments[result.like] if result.like else seen.base
    dtype = base.dtype if result.dtype is None or result.like else _named_dtype(result.dtype, seen)
    if result.flag and not seen.arguments[result.flag]:
        return base.new_empty(0, dtype=dtype)
    if not result.shapes:
        return base.new_empty(base.shape)
    (shape,) = result.shapes
    sizes = [_evaluate(op, ast.parse(dim, mode="eval").body, seen) for dim in shape.dims]
    if shape.any_before:
        assert seen.before is not None
        other, other_shape = seen.before
        sizes = [*_before(seen.arguments[other], other_shape), *sizes]
    return base.new_empty(sizes, dtype=dtype)


def _evaluate(op: str, node: ast.expr, seen: _Seen) -> Any:
    """Computes an expression of sizes and number arguments. A division must have no remainder."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return seen.value(name)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _evaluate(op, left, seen) * _evaluate(op, right, seen)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            whole, part = _evaluate(op, left, seen), _evaluate(op, right, seen)
            names = ast.unparse(left), ast.unparse(right)
            check(whole % part == 0, op, f": {names[0]} = ", whole, f" is not a multiple of {names[1]} = ", part)
            return whole // part
    raise ValueError(f"{ast.unparse(node)!r} is not made of names, numbers, * and /")
