"""Records what torch.export concludes about sizes, and at which line of the model."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from exportkit.export.proofs import Ranges, Verdict, verdict
from exportkit.export.shapes import DynamicSizes
from exportkit.export.source_lines import user_frame, where
from exportkit.export.torch_internals import replaced
from exportkit.package.manifest import Size

SOURCE = re.compile(r"L\[['\"](?P<name>\w+)['\"]\](?P<path>.*?)\.size\(\)\[(?P<dim>\d+)\]")


@dataclass
class Declared:
    """What the caller declared of sizes, in the symbols of a trace.

    Attributes:
        places: The size of each place, such as "image:2".
        ranges: The range of each name.
    """

    places: Mapping[str, Size] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    _known: dict[sympy.Basic, Verdict] = field(default_factory=dict)

    def verdict(self, condition: object, env: ShapeEnv) -> Verdict:
        """Judges a condition over the declared ranges, where a name is one number at all its places.

        Tracing takes every size to be at least 2, so a condition that fails at 1 alone counts as true, as torch's own do.
        """
        if not isinstance(condition, sympy.Basic):
            return Verdict.UNTRUE
        places = {symbol: self.places.get(place or "") for symbol, place in _places_of_symbols(env).items()}
        named = condition.xreplace({symbol: _in_names(size) for symbol, size in places.items() if size})
        if named not in self._known:
            found = verdict(named, _symbols(self.ranges))
            self._known[named] = verdict(named, _symbols(self._from_two())) if found is Verdict.UNTRUE else found
        return self._known[named]

    def _from_two(self) -> dict[str, tuple[int, int]]:
        """Returns the ranges without the values at which a place has a size below 2."""
        ranges = dict(self.ranges)
        for size in self.places.values():
            low, high = ranges[size.dimension]
            ranges[size.dimension] = (max(low, -((size.offset - 2) // size.scale)), high)
        return {name: ends for name, ends in ranges.items() if ends[0] <= ends[1]}


def declared(sizes: DynamicSizes, state: Mapping[str, str] = MappingProxyType({})) -> Declared:
    """Returns what the caller declared.

    Args:
        sizes: The sizes of the inputs.
        state: The names that further places have.
    """
    places = {f"{tensor}:{dim}": size for tensor, dims in sizes.places.items() for dim, size in dims.items()}
    return Declared(
        places={**places, **{place: Size(dimension=name) for place, name in state.items()}},
        ranges={dimension.name: (dimension.min, dimension.max) for dimension in sizes.dimensions},
    )


@dataclass
class GuardLog:
    """The conditions on sizes, in the order in which the model's lines needed them.

    Attributes:
        declared: What the caller declared of sizes.
        entries: The conditions, each with the line.
    """

    declared: Declared = field(default_factory=Declared)
    entries: list[tuple[ShapeEnv, object, traceback.FrameSummary | None]] = field(default_factory=list)

    def lines(self, places: Iterable[str]) -> list[str]:
        """Returns the lines that depended on one of the places, such as "image:2", each once.

        A condition that holds for all declared sizes is no reason to refuse them, and is left out.
        """
        wanted = set(places)
        found: dict[str, list[tuple[bool, int, str]]] = {}
        for env, guard, frame in self.entries:
            sources = _places_of_symbols(env)
            symbols: set[sympy.Symbol] = getattr(guard, "free_symbols", set())
            if frame is None or not any(sources.get(symbol) in wanted for symbol in symbols):
                continue
            if self.declared.verdict(guard, env) is not Verdict.UNTRUE:
                continue
            text = placed_relation(guard, env)
            # One line may need several conditions: the one that fixes a size says most, and the shortest is clearest.
            found.setdefault(where(frame), []).append((not _fixes_size(guard), len(text), text))
        return [f"{place} needs {min(texts)[2]}" for place, texts in found.items()]

    def hold_at(self, values: Mapping[str, int], *, equations: bool = False) -> bool:
        """Returns whether every condition on these places alone holds if the places have these sizes.

        Args:
            values: A size for each place.
            equations: Only equations count. Tracing also assumes that no size is 1, which torch forgives.
        """
        places_of = functools.cache(_places_of_symbols)
        for env, guard, _ in self.entries:
            symbols = getattr(guard, "free_symbols", None)
            if not symbols or (equations and not isinstance(guard, sympy.Eq)):
                continue
            places = places_of(env)
            known = {symbol: values[place] for symbol in symbols if (place := places.get(symbol) or "") in values}
            if isinstance(guard, sympy.Basic) and len(known) == len(symbols) and guard.xreplace(known) == sympy.false:
                return False
        return True


@contextmanager
def guard_log(known: Declared) -> Iterator[GuardLog]:
    """Records which line of the model's code each guard on a size comes from, and lets torch refuse only untrue ones.

    torch's own record (SLoc) has the line inside of torch, which does not help the user. And torch refuses what it cannot
    prove: a minimum, a division that rounds, a relation of two places that have one name.
    """
    log = GuardLog(known)

    def recording(log_guard: Callable[..., None]) -> Callable[..., None]:
        def record(env: ShapeEnv, prefix: str, guard: object, *rest: Any, **named: Any) -> None:
            log.entries.append((env, guard, user_frame(traceback.extract_stack())))
            log_guard(env, prefix, guard, *rest, **named)

        return record

    def producing(produce: Callable[..., Any]) -> Callable[..., Any]:
        def without_true(env: ShapeEnv, *args: Any, guards: Sequence[Any] | None = None, **named: Any) -> Any:
            given = env.guards if guards is None else guards
            kept = [guard for guard in given if known.verdict(guard.expr, env) is Verdict.UNTRUE]
            return produce(env, *args, guards=kept, **named)

        return without_true

    with replaced(ShapeEnv, "_log_guard", recording), replaced(ShapeEnv, "produce_guards", producing):
        yield log


def with_places(line: str) -> str:
    """Returns a line of torch's message with the places named as on the command line."""
    line = re.sub(r"\s*If you're using mark_dynamic.*", "", line)
    return SOURCE.sub(_place, line)


def _in_names(size: Size) -> sympy.Expr:
    return size.scale * _name(size.dimension) + size.offset


def _name(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


def _symbols(ranges: Mapping[str, tuple[int, int]]) -> Ranges:
    return {_name(name): ends for name, ends in ranges.items()}


def _places_of_symbols(env: ShapeEnv) -> dict[sympy.Symbol, str | None]:
    return {symbol: _source_place(names) for symbol, names in env.var_to_sources.items()}


def _source_place(sources: Iterable[object]) -> str | None:
    """Turns `L['image'].size()[2]` into "image:2". Nested inputs become "batch.mask:0"."""
    for source in sources:
        if match := SOURCE.fullmatch(str(getattr(source, "name", ""))):
            return _place(match)
    return None


def _place(match: re.Match[str]) -> str:
    path = "".join(f".{part}" for part in re.findall(r"\w+", match["path"]))
    return f"{match['name']}{path}:{match['dim']}"


def _fixes_size(guard: object) -> bool:
    return isinstance(guard, sympy.Eq) and (guard.lhs.is_Integer or guard.rhs.is_Integer)


def placed_relation(guard: object, env: ShapeEnv) -> str:
    """Writes a guard in Python's notation, with the places of the inputs' sizes, such as "image:2"."""
    text, sources = relation_text(guard), _places_of_symbols(env)
    symbols: set[sympy.Symbol] = getattr(guard, "free_symbols", set())
    for symbol in sorted(symbols, key=lambda symbol: -len(symbol.name)):
        text = re.sub(rf"\b{symbol.name}\b", sources.get(symbol) or symbol.name, text)
    return text


def relation_text(guard: object) -> str:
    """Writes a guard in Python's notation, where SymPy has Eq(a, b)."""
    for kind, sign in ((sympy.Eq, "=="), (sympy.Ne, "!=")):
        if isinstance(guard, kind):
            return f"{guard.lhs} {sign} {guard.rhs}"
    return str(guard)
