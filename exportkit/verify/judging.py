"""Judges the answers to a sequence of calls: FORMAT.md, "Verdicts", call by call, and then the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from exportkit.package.case_files import (
    recorded_errors,
    recorded_state_errors,
    result_keys,
    results_in,
    results_of,
    state_keys,
    state_results,
)
from exportkit.package.manifest import Case, Manifest, Node, TensorOutput
from exportkit.sizes import state_sizes
from exportkit.tensor_bytes import tensor_bytes
from exportkit.verify.compare import Reference, compare_outputs
from exportkit.verify.comparisons import OutputComparison
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Verdict, WrongDtype, WrongShape, WrongStructure
from exportkit.verify.replayer import ReplayTask
from exportkit.verify.value_verdicts import Judged, Match, judged


@dataclass(frozen=True)
class Judge:
    """Compares answers with what was expected.

    Attributes:
        manifest: The package's manifest.
        options: The verification's options: tolerances.
        fresh: Whether eager was run for this comparison. Its errors in it then count as well.
    """

    manifest: Manifest
    options: VerifyOptions
    fresh: bool = False

    def verdict(
        self,
        task: ReplayTask,
        expected: Mapping[str, torch.Tensor],
        answers: Mapping[str, torch.Tensor],
        structures: Mapping[int, str],
        calls: Sequence[int] | None = None,
    ) -> Verdict:
        """Judges calls of a task, and then the state if it was expected.

        Judges only the given `calls`, if there are any.
        """
        case = task.case
        found: list[OutputComparison] = []
        for number in range(len(case.calls)) if calls is None else calls:
            if (wrong := self.structure(task, number, structures[number])) is not None:
                return wrong
            verdict = self._call(task, number, expected, answers)
            prefix = f"call {number}: " if len(case.calls) > 1 else ""
            if not isinstance(verdict, Judged):
                return _named(verdict, prefix)
            found += (replace(each, name=prefix + each.name, call=number) for each in verdict.outputs)
        verdict = self._state(task, expected, answers)
        if not isinstance(verdict, Judged):
            return _named(verdict, "state ")
        found += (replace(each, name=f"state {each.name}", call=None) for each in verdict.outputs)
        return judged(found)

    def structure(self, task: ReplayTask, number: int, structure: str) -> WrongStructure | None:
        """Compares the structure of a result with the manifest's."""
        expected = self.manifest.method(task.case.calls[number].method).call.result
        if msgspec.json.decode(structure, type=Node) == expected:
            return None
        of = f" of {task.call_name(number)}" if len(task.case.calls) > 1 else ""
        return WrongStructure(msgspec.json.encode(expected).decode(), structure, of)

    def _call(
        self, task: ReplayTask, number: int, expected: Mapping[str, torch.Tensor], answers: Mapping[str, torch.Tensor]
    ) -> Judged | WrongDtype | WrongShape | WrongStructure:
        recorded = task.case.calls[number]
        call = self.manifest.method(recorded.method).call
        references = results_in(result_keys(number, call, reference=True), expected)
        errors = recorded_errors(self.manifest.cases, recorded.method)
        keys = result_keys(number, call)
        reference = Reference(references, errors, self.fresh, results_in(keys, task.moves))
        return self._compare(results_of(call), keys, expected, answers, reference, recorded.sizes)

    def _state(
        self, task: ReplayTask, expected: Mapping[str, torch.Tensor], answers: Mapping[str, torch.Tensor]
    ) -> Judged | WrongDtype | WrongShape | WrongStructure:
        state = self.manifest.state
        keys = state_keys(state)
        if not state or not all(key in expected for key in keys.values()):
            return Match(())  # too large to be recorded, or the calls have none
        references = results_in(state_keys(state, reference=True), expected)
        errors, sizes = recorded_state_errors(self.manifest.cases), state_sizes(self.manifest, task.case)
        reference = Reference(references, errors, self.fresh, results_in(keys, task.moves))
        return self._compare(state_results(state), keys, expected, answers, reference, sizes)

    def _compare(
        self,
        results: Sequence[TensorOutput],
        keys: Mapping[str, str],
        expected: Mapping[str, torch.Tensor],
        answers: Mapping[str, torch.Tensor],
        reference: Reference,
        sizes: Mapping[str, int],
    ) -> Judged | WrongDtype | WrongShape | WrongStructure:
        return compare_outputs(
            results,
            [expected[keys[each.name]] for each in results],
            [answers[keys[each.name]] for each in results],
            reference=reference,
            sizes=sizes,
            rtol=self.options.rtol,
            atol=self.options.atol,
        )


def _named(verdict: WrongDtype | WrongShape | WrongStructure, prefix: str) -> Verdict:
    if isinstance(verdict, WrongStructure):
        return replace(verdict, call=f" of {prefix.rstrip(': ')}" if prefix else "")
    return replace(verdict, output=prefix + verdict.output)


def first_difference(
    manifest: Manifest,
    case: Case,
    expected: Mapping[str, torch.Tensor],
    answers: Mapping[str, torch.Tensor],
    calls: Sequence[int],
) -> str | None:
    """Returns where answers first differ from expected ones, bit for bit; None if they are equal.

    The state is compared where both have it.
    """
    names: dict[str, str] = {}
    for number in calls:
        keys = result_keys(number, manifest.method(case.calls[number].method).call)
        names |= {key: f"call {number} ({case.calls[number].method}): {name}" for name, key in keys.items()}
    state = {key: f"state {name}" for name, key in state_keys(manifest.state).items()}
    names |= {key: name for key, name in state.items() if key in expected and key in answers}
    differing = {key: name for key, name in names.items() if not _equal_bits(expected[key], answers[key])}
    if not differing:
        return None
    first = next(iter(differing))
    more = f", and {len(differing) - 1} more results" if len(differing) > 1 else ""
    return f"First difference: {differing[first]}, {_count(expected[first], answers[first])}{more}."


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(tensor_bytes(one), tensor_bytes(other))


def _count(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
    rows = (tensor_bytes(tensor).reshape(tensor.numel(), tensor.element_size()) for tensor in (one, other))
    differ = (next(rows) != next(rows)).any(1)
    return f"{int(differ.sum())} of {one.numel()} elements"
