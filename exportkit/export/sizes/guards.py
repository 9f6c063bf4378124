"""Records what torch.export concludes about sizes, and at which line; lets it refuse only what is untrue."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch.export.exported_program import _convert_guards_to_code, _get_shape_env
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from exportkit.export.models.source_lines import user_frame, where
from exportkit.export.sizes.declared import Declared
from exportkit.export.torch_patches.patched import Function, all_patched

SOURCE = re.compile(r"L\[['\"](?P<name>\w+)['\"]\](?P<path>.*?)\.size\(\)\[(?P<dim>\d+)\]")


@dataclass(frozen=True)
class Condition:
    """A condition on sizes for which a trace is right.

    Attributes:
        env: torch's record of the trace's sizes.
        guard: The condition, in the symbols of the trace.
        frame: The line of the model that needed it, or None.
    """

    env: ShapeEnv
    guard: Any
    frame: traceback.FrameSummary | None


@dataclass
class GuardLog:
    """The conditions on sizes, in the order in which the model's lines needed them.

    Attributes:
        declared: What the caller declared of sizes.
        assumed: The conditions, in names, that may fail for declared sizes, because eager has judged them. None means
            all: a trace is held against eager.
        entries: The conditions.
    """

    declared: Declared = field(default_factory=Declared)
    assumed: Collection[sympy.Basic] | None = None
    entries: list[Condition] = field(default_factory=list)

    def hypothesis(self, guard: object, env: ShapeEnv) -> sympy.Basic | None:
        """Returns a condition in names if it fails for declared sizes and eager is to judge it, else None."""
        named = self._named(guard, env)
        if named is None or not self._of_names(named) or not self.declared.untrue(named):
            return None
        return named if self.assumed is None or named in self.assumed else None

    def hypotheses(self) -> list[sympy.Basic]:
        """Returns the conditions, in names, that eager is to judge."""
        found = (self.hypothesis(entry.guard, entry.env) for entry in self.entries)
        return list(dict.fromkeys(each for each in found if each is not None))

    def refuting(self, env: ShapeEnv, guards: Sequence[Any]) -> list[Any]:
        """Returns those of torch's guards because of which the declared sizes are to be refused."""
        return [guard for guard in guards if self._untrue(guard.expr, env)]

    def drop_untrue(self, program: torch.export.ExportedProgram) -> None:
        """Removes what a program asserts of sizes and what fails at declared ones: there it is held against eager."""
        env = _get_shape_env(program.graph_module)
        if env is None:
            return
        untrue = [guard for guard in env.guards if self.hypothesis(guard.expr, env) is not None]
        for guard in untrue:
            for implied, _ in env.get_implications(env.simplify(guard.expr)):
                env.axioms.pop(implied, None)  # else the compiler takes it for granted
        _JUDGED[env] = [guard.expr for guard in untrue]
        env.guards = [guard for guard in env.guards if guard not in untrue]
        env._maybe_evaluate_static.cache_clear()
        program._guards_code = _convert_guards_to_code(program.graph_module)

    def lines(self, places: Iterable[str]) -> list[str]:
        """Returns the lines that depended on one of the places, such as "image:2", each once.

        A condition that holds for all declared sizes is no reason to refuse them, and is left out.
        """
        wanted = set(places)
        found: dict[str, list[tuple[bool, int, str]]] = {}
        for entry in self.entries:
            sources = _places_of_symbols(entry.env)
            symbols: set[sympy.Symbol] = getattr(entry.guard, "free_symbols", set())
            if entry.frame is None or not any(sources.get(symbol) in wanted for symbol in symbols):
                continue
            if not self._untrue(entry.guard, entry.env):
                continue
            text = placed_relation(entry.guard, entry.env)
            # One line may need several conditions: the one that fixes a size says most, and the shortest is clearest.
            fixes = isinstance(entry.guard, sympy.Eq) and (entry.guard.lhs.is_Integer or entry.guard.rhs.is_Integer)
            found.setdefault(where(entry.frame), []).append((not fixes, len(text), text))
        return [f"{place} needs {min(texts)[2]}" for place, texts in found.items()]

    def refuted(self) -> list[sympy.Basic]:
        """Returns the conditions, in names, because of which declared sizes are refused."""
        found = [self._named(entry.guard, entry.env) for entry in self.entries if self._untrue(entry.guard, entry.env)]
        return list(dict.fromkeys(each for each in found if each is not None and self._of_names(each)))

    def _of_names(self, condition: sympy.Basic) -> bool:
        """Returns whether a condition is on names, and on nothing else."""
        symbols = condition.free_symbols
        return bool(symbols) and all(symbol.name in self.declared.ranges for symbol in symbols)

    def _untrue(self, guard: object, env: ShapeEnv) -> bool:
        """Returns whether a condition fails for declared sizes, and eager is not to judge it."""
        named = self._named(guard, env)
        return named is None or (self.declared.untrue(named) and self.hypothesis(guard, env) is None)

    def _named(self, guard: object, env: ShapeEnv) -> sympy.Basic | None:
        if not isinstance(guard, sympy.Basic):
            return None
        return self.declared.in_names(guard, _places_of_symbols(env))


_JUDGED: WeakKeyDictionary[ShapeEnv, Sequence[sympy.Basic]] = WeakKeyDictionary()


def judged_conditions(program: torch.export.ExportedProgram) -> Sequence[sympy.Basic]:
    """Returns the conditions, in the symbols of a newly traced program, that fail where it was held against eager."""
    return _JUDGED.get(_get_shape_env(program.graph_module), ())


@contextmanager
def guard_log(declared: Declared) -> Iterator[GuardLog]:
    """Records which line of the model's code each guard on a size comes from, and lets torch refuse only untrue ones.

    torch's own record (SLoc) has the line inside of torch, which does not help the user. And torch refuses what it
    cannot prove: a minimum, a division that rounds, a relation of two places that have one name. From what fails for
    declared sizes, which eager judges, torch concludes nothing: a trace keeps the sizes that it was made for.
    """
    log = GuardLog(declared)

    def record(log_guard: Function, env: ShapeEnv, prefix: str, guard: object, *rest: Any, **named: Any) -> None:
        log.entries.append(Condition(env, guard, user_frame(traceback.extract_stack())))
        log_guard(env, prefix, guard, *rest, **named)

    def without_true(
        produce: Function, env: ShapeEnv, *args: Any, guards: Sequence[Any] | None = None, **named: Any
    ) -> Any:
        return produce(env, *args, guards=log.refuting(env, env.guards if guards is None else guards), **named)

    def from_true(conclude: Function, env: ShapeEnv, guard: object) -> None:
        if log.hypothesis(guard, env) is None:
            conclude(env, guard)

    with all_patched(
        ("ShapeEnv._log_guard", record),
        ("ShapeEnv.produce_guards", without_true),
        ("ShapeEnv._maybe_guard_rel", from_true),
    ):
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
