"""Finds valid calls of an operator of which only the schema is known, by trial.

A call that the kernel refuses with an exception is not valid. What the exception says leads to the next call: it may
name an argument, a dtype, a rank or a number. A refusal that was not seen before means that the call came further, so
that forms with new refusals are varied first, as a fuzzer does with new coverage.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exportkit.operators.contract.sample import Sample
from exportkit.operators.tools.forms import (
    Argument,
    Form,
    TensorForm,
    UnknownTypeError,
    arguments_of,
    draw,
    shapes_text,
    tensor_forms,
)

Try = Callable[[Sample], str | None]
"""Calls the operator. Returns what it refused the call with, or None. Raises StopSearch to end the search."""


class StopSearch(Exception):
    """No more calls shall be tried."""


_SHAPES = ((3, 5), (4,), (2, 3, 5), (2, 3, 4, 5), ())
_SIZES = (1, 2, 3, 4, 5, 8, 16, 32)
_FLOATS = (0.5, 1.0, 0.0, 0.1, 2.0, -1.0)
_DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool, torch.float16, torch.bfloat16, torch.float64)
_SAID_DTYPES: tuple[tuple[str, torch.dtype], ...] = (
    (r"float32|\bfloat\b|single", torch.float32),
    (r"float64|\bdouble\b", torch.float64),
    (r"bfloat16|bf16", torch.bfloat16),
    (r"float16|\bhalf\b|fp16", torch.float16),
    (r"int64|\blong\b", torch.int64),
    (r"int32|\bint\b", torch.int32),
    (r"int16|\bshort\b", torch.int16),
    (r"uint8|\bbyte\b", torch.uint8),
    (r"int8|\bchar\b", torch.int8),
    (r"\bbool", torch.bool),
    (r"complex", torch.complex64),
)
_KEPT = 4  # forms of valid calls
_OPTIONS = 8  # forms of valid calls with other options, beside these
_TOGETHER = 4  # forms of valid calls with several optional arguments, beside these


@dataclass
class _Seed:
    form: Form
    refusal: str
    varied: int = 0


def search_calls(schema: torch.FunctionSchema, attempt: Try, device: torch.device, seed: int, **limits: Any) -> Search:
    """Searches valid calls, with tensors on a device. The limits are those of Search."""
    return Search(arguments_of(schema), attempt, device, random.Random(seed), **limits).run()


@dataclass
class Search:
    """A search for valid calls, and what it found: `valid` has their forms, the simplest first.

    It ends after so many tries or seconds, or as many calls in a row that are refused with nothing new. `refusals` has
    what calls were refused with, and how often; `obstacle`, why no call can be drawn at all.
    """

    arguments: tuple[Argument, ...]
    attempt: Try
    device: torch.device
    chance: random.Random
    tries: int = 2000
    patience: int = 600
    seconds: float = 20.0

    def __post_init__(self) -> None:
        self.valid: list[Form] = []
        self.tried = 0
        self.refusals: Counter[str] = Counter()
        self.obstacle: str | None = None
        self._ends = time.monotonic() + self.seconds
        self._seen: set[Form] = set()
        self._seeds: dict[str, _Seed] = {}
        self._numbers = {0, 1, 2, 3, 4, 8}  # and those that refusals name
        self._words: set[str] = set()
        self._news = 0  # the try with the last new refusal

    def summary(self) -> str:
        """Says what was tried, for an operator without a valid call."""
        if self.obstacle is not None:
            return self.obstacle
        ranked = self.refusals.most_common(3)
        said = "; ".join(f"{count} times: {self._seeds[kind].refusal}" for kind, count in ranked)
        return f"{self.tried} drawn calls were refused, with {len(self.refusals)} different messages. {said}"

    def run(self) -> Search:
        """Searches, and returns itself."""
        try:
            simplest = [tuple(argument.first(shape) for argument in self.arguments) for shape in _SHAPES]
        except UnknownTypeError as error:
            self.obstacle = str(error)
            return self
        with contextlib.suppress(StopSearch):
            self._search(simplest)
        return self

    def _search(self, simplest: Sequence[Form]) -> None:
        for form in simplest:
            if len(self.valid) < _KEPT:
                self._try(form)
        while not self.valid and self._goes_on() and self._seeds:
            seed = min(self._seeds.values(), key=lambda each: (each.varied, self.chance.random()))
            seed.varied += 1
            for _ in range(8):
                form = seed.form
                for _ in range(self.chance.choice((1, 1, 2, 3))):
                    form = self._changed(form, seed.refusal)
                self._try(form)
                if self.valid:
                    break
        most = len(self.valid) + _OPTIONS
        for number, form in enumerate((self.valid * 2)[:2]):
            for others in self._with_other_options(form):
                for other in reversed(others) if number else others:
                    if len(self.valid) < most and self._try(other):
                        break
            if not number:
                self._try_together(form)

    def _goes_on(self) -> bool:
        if self.tried - self._news > self.patience:
            return False
        return self.tried < self.tries and time.monotonic() < self._ends

    def _try(self, form: Form) -> bool:
        """Calls the operator with a form that is new. Returns whether it is valid."""
        if form in self._seen or not self._goes_on():
            return False
        self._seen.add(form)
        self.tried += 1
        refusal = self.attempt(draw(self.arguments, form, f"drawn: {shapes_text(form)}", self.device))
        if refusal is None:
            self.valid.append(form)
            return True
        kind = re.sub(r"-?\d+(\.\d+)?", "#", refusal)
        self._news = self.tried if kind not in self.refusals else self._news
        self.refusals[kind] += 1
        self._numbers |= {int(text) for text in re.findall(r"\b\d{1,4}\b", refusal)}
        self._words |= set(re.findall(r"['\"]([\w.-]{1,20})['\"]", refusal))
        if kind not in self._seeds or self.chance.random() < 0.1:
            varied = self._seeds[kind].varied if kind in self._seeds else 0
            self._seeds[kind] = _Seed(form, refusal, varied)
        return False

    # --- other forms ----------------------------------------------------------------------------------------------

    def _with_other_options(self, form: Form) -> Iterator[list[Form]]:
        """Yields the form with other values, an argument at a time. Its shapes stay, so that they still fit."""
        shapes = [each.shape for each in tensor_forms(form)] or [(3, 5)]
        for index, (argument, value) in enumerate(zip(self.arguments, form)):
            others: list[Any] = [None] if argument.optional else []
            if argument.listed:
                yield self._with_other_lengths(form, index, shapes[0])
            elif argument.is_tensor and argument.optional:
                others += [argument.tensor(shape) for shape in dict.fromkeys([*shapes, *(s[-1:] for s in shapes)])]
            elif argument.kind == "bool":
                others += [not value]
            elif argument.kind == "float":
                others += [0.1, 2.0]
            elif argument.kind in ("int", "SymInt", "number"):
                others += [2, *(size for shape in shapes for size in shape if size > 1), 3]  # 3 of 4 leaves a tail
            yield [_replaced(form, index, other) for other in others if other != value]

    def _try_together(self, form: Form) -> None:
        """Tries the form without optional arguments, with all of them, and with pairs: values taken alone first."""
        self._try(tuple(None if argument.optional else value for argument, value in zip(self.arguments, form)))
        others = [other for forms in self._with_other_options(form) for other in forms]
        values: dict[int, list[Any]] = {}
        for index, argument in enumerate(self.arguments):
            given = [other[index] for other in others if other[index] not in (None, form[index])]
            if argument.optional and given:
                values[index] = sorted(given, key=lambda value: _replaced(form, index, value) not in self.valid)
        for indices in [tuple(values), *itertools.combinations(values, 2)][:_TOGETHER]:
            for number in range(max(map(len, values.values()), default=0)):
                other = form
                for index in indices:
                    other = _replaced(other, index, values[index][min(number, len(values[index]) - 1)])
                if self._try(other):
                    break

    def _with_other_lengths(self, form: Form, index: int, shape: tuple[int, ...]) -> list[Form]:
        """Returns the form with a list of other lengths, alone and with all lists, which may have to be as long."""
        argument, lists = self.arguments[index], [len(v) if isinstance(v, tuple) else 0 for v in form]
        element = form[index][0] if lists[index] else argument.one(shape)
        if argument.length is not None or element is None:
            return []
        found = []
        for length in dict.fromkeys([3, 1] if lists[index] else [*filter(None, lists), 2, 1]):
            own = _replaced(form, index, (element,) * length)
            found += [own, tuple(v[:1] * length if n and v else v for n, v in zip(lists, own))]
        return found

    def _changed(self, form: Form, refusal: str) -> Form:
        """Returns the form with something else, more likely what the refusal names."""
        arguments = self.arguments
        named = [i for i, a in enumerate(arguments) if re.search(rf"\b{re.escape(a.name)}\b", refusal)]
        wanted = [i for i, a in enumerate(arguments) if a.default is Argument.REQUIRED or self.chance.random() < 0.2]
        candidates = named if named and self.chance.random() < 0.6 else wanted or list(range(len(arguments)))
        if not candidates:
            return form
        if self.chance.random() < 0.15 and (dtypes := _said_dtypes(refusal)):
            dtype = self.chance.choice(dtypes)
            return tuple(_mapped(value, lambda each: replace(each, dtype=dtype)) for value in form)
        sizes = sorted({size for each in tensor_forms(form) for size in each.shape})
        if sizes and self.chance.random() < 0.25:  # wherever it is, so that what was equal stays equal
            old, new = self.chance.choice(sizes), self.chance.choice([*_SIZES, *self._named_sizes()])

            def resized(each: TensorForm) -> TensorForm:
                return replace(each, shape=tuple(new if size == old else size for size in each.shape))

            return tuple(_mapped(value, resized) for value in form)
        index = self.chance.choice(candidates)
        return _replaced(form, index, self._other_value(arguments[index], form[index], form, refusal))

    def _other_value(self, argument: Argument, value: Any, form: Form, refusal: str) -> Any:
        chance = self.chance
        if argument.optional and not argument.listed and value is not None and chance.random() < 0.3:
            return None
        if argument.listed:
            parts = list(value or ())
            if argument.length is None and chance.random() < 0.3:
                longer = [*parts, self._one(argument, None, form, refusal)]
                parts = parts[:-1] if parts and chance.random() < 0.5 else longer
            elif parts:
                place = chance.randrange(len(parts))
                parts[place] = self._one(argument, parts[place], form, refusal)
                if chance.random() < 0.5:
                    parts = [parts[place]] * len(parts)
            return tuple(parts)
        return self._one(argument, value, form, refusal)

    def _one(self, argument: Argument, value: Any, form: Form, refusal: str) -> Any:
        chance = self.chance
        match argument.kind:
            case "Tensor":
                return self._tensor(value or argument.tensor(chance.choice(_SHAPES)), form, refusal)
            case "int" | "SymInt" | "number":
                sizes = [size for each in tensor_forms(form) for size in each.shape]
                return chance.choice(sorted({*self._numbers, *sizes, *(size * 2 for size in sizes)}))
            case "float":
                return chance.choice(_FLOATS)
            case "bool":
                return not value
            case "str":
                return chance.choice(sorted({*self._words, "", "mean", "sum"}))
            case "ScalarType":
                return chance.choice([*_said_dtypes(refusal), *_DTYPES])
            case _:
                return value

    def _tensor(self, tensor: TensorForm, form: Form, refusal: str) -> TensorForm:
        chance = self.chance
        others = [each.shape for each in tensor_forms(form)] or [tensor.shape]
        roll = chance.random()
        if roll < 0.25:
            return replace(tensor, dtype=chance.choice([*_said_dtypes(refusal) * 4, *_DTYPES]))
        if roll < 0.45:
            return replace(tensor, shape=chance.choice([*others, *_said_shapes(refusal) * 4]))
        if roll < 0.6:
            rank, other = chance.choice(_said_ranks(refusal) or [1, 2, 3, 4]), chance.choice(others)
            last = other[len(other) - min(rank, len(other)) :]
            return replace(tensor, shape=last if chance.random() < 0.5 else (other + _SIZES[2:])[:rank])
        if roll < 0.7:
            return replace(tensor, values=chance.choice(("normal", "index", "offsets", "permutation")))
        if not tensor.shape:
            return replace(tensor, shape=(chance.choice(_SIZES),))
        sizes = [size for shape in others for size in shape]
        related = [size + 1 for size in sizes] + [max(0, size - 1) for size in sizes] + [2 * size for size in sizes]
        shape = list(tensor.shape)
        shape[chance.randrange(len(shape))] = chance.choice([*sizes, *sizes, *related, *_SIZES, *self._named_sizes()])
        return replace(tensor, shape=tuple(shape))

    def _named_sizes(self) -> list[int]:
        return sorted(number for number in self._numbers if 0 < number <= 512)


def _replaced(form: Form, index: int, value: Any) -> Form:
    return (*form[:index], value, *form[index + 1 :])


def _mapped(value: Any, change: Callable[[TensorForm], TensorForm]) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_mapped(each, change) for each in value)
    return change(value) if isinstance(value, TensorForm) else value


def _said_shapes(refusal: str) -> list[tuple[int, ...]]:
    """Returns the shapes that a refusal quotes, such as [2, 3]."""
    found = re.findall(r"[\[(]((?:\d{1,4}(?:, ?|(?=[\])])))+)[\])]", refusal)
    return [tuple(int(size) for size in text.split(",") if size.strip()) for text in found]


def _said_ranks(refusal: str) -> list[int]:
    """Returns the ranks that a refusal names, such as "2D", "2 dimensions", "dim() == 2"."""
    found = re.findall(r"\b([0-5])[- ]?(?:[dD]\b|dim)|(?:rank|dim\(?\)?)\D{1,8}([0-5])\b", refusal)
    return [int(number) for numbers in found for number in numbers if number]


def _said_dtypes(refusal: str) -> list[torch.dtype]:
    return [dtype for pattern, dtype in _SAID_DTYPES if re.search(pattern, refusal, re.IGNORECASE)]
