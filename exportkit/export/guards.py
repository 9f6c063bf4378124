"""Records what torch.export concludes about sizes, and at which line of the model."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from exportkit.export.source_lines import user_frame, where
from exportkit.export.torch_internals import replaced

SOURCE = re.compile(r"L\[['\"](?P<name>\w+)['\"]\](?P<path>.*?)\.size\(\)\[(?P<dim>\d+)\]")


@dataclass
class GuardLog:
    """The conditions on sizes, in the order in which the model's lines needed them."""

    entries: list[tuple[ShapeEnv, object, traceback.FrameSummary | None]] = field(default_factory=list)

    def lines(self, places: Iterable[str]) -> list[str]:
        """Returns the lines that depended on one of the places, such as "image:2", each once."""
        wanted = set(places)
        found: dict[str, list[tuple[bool, int, str]]] = {}
        for env, guard, frame in self.entries:
            sources = _places_of_symbols(env)
            symbols: set[sympy.Symbol] = getattr(guard, "free_symbols", set())
            if frame is None or not any(sources.get(symbol) in wanted for symbol in symbols):
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
def guard_log() -> Iterator[GuardLog]:
    """Records which line of the model's code each guard on a size comes from.

    torch's own record (SLoc) has the line inside of torch, which does not help the user.
    """
    log = GuardLog()

    def recording(log_guard: Callable[..., None]) -> Callable[..., None]:
        def record(env: ShapeEnv, prefix: str, guard: object, *rest: Any, **named: Any) -> None:
            log.entries.append((env, guard, user_frame(traceback.extract_stack())))
            log_guard(env, prefix, guard, *rest, **named)

        return record

    with replaced(ShapeEnv, "_log_guard", recording):
        yield log


def with_places(line: str) -> str:
    """Returns a line of torch's message with the places named as on the command line."""
    line = re.sub(r"\s*If you're using mark_dynamic.*", "", line)
    return SOURCE.sub(_place, line)


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
