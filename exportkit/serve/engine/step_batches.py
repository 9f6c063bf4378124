"""Runs a step of several sequences in one call: the rows of their state are gathered, and what is written goes back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exportkit.errors import ModelRunError
from exportkit.package.case_files import state_results
from exportkit.package.manifest import Dimension, Manifest, PackagedMethod, Size, StateTensor
from exportkit.runtime.loaded_cases import LoadedCall, LoadedCase
from exportkit.runtime.model import Model
from exportkit.runtime.requests import joined
from exportkit.runtime.session import Session
from exportkit.runtime.state import state_dimensions
from exportkit.serve.engine.batchable import Batching, batch_dimension
from exportkit.serve.engine.checked_request import arguments_of
from exportkit.serve.engine.model_copy import ModelCopy, tensors_in
from exportkit.serve.engine.warm_up import flat_inputs, recorded_sequence, rolled_rows, same_bits
from exportkit.verify.compare import Match, compare_outputs

_MOST_TRIED = 32  # sequences in one call
_KINDS = 4  # of sequences that differ, among those that are tried together

_Flat = list[torch.Tensor]


def step_dimension(manifest: Manifest, method: PackagedMethod) -> Dimension | str:
    """Finds the dimension that is axis 0 of every input, output and state of a method, and no other size anywhere.

    Returns:
        The dimension, or why steps of different sequences cannot run together.
    """
    found = batch_dimension(method.call)
    if isinstance(found, str):
        return found
    if set(state_dimensions(manifest)) != {found.name}:
        return f"the size of the state is not {found.name} alone"
    for use in method.state:
        if reason := _why_not(manifest.state[use.index], found.name):
            return reason
    return found


def _why_not(state: StateTensor, batch: str) -> str | None:
    if not state.shape or state.shape[0] != Size(dimension=batch):
        return f"the first size of the state `{state.name}` is not {batch}, so its rows are not the sequences'"
    return None


class JoinedSteps:
    """Runs one method for several sessions of this process at once. Only one thread uses it."""

    def __init__(self, method: PackagedMethod, dimension: str) -> None:
        """`dimension` is that of `step_dimension`."""
        self._method = method.name
        self._dimension = dimension
        self._arguments = arguments_of(method.call)
        self._read = [use.index for use in method.state]
        self._written = [use.index for use in method.state if use.written]
        self._memory: tuple[Model, list[torch.Tensor], int] | None = None

    def run(self, model: Model, sessions: Sequence[Session], inputs: _Flat) -> tuple[_Flat, NewState]:
        """Runs a step of each session, with the inputs of all on the model's device.

        No session is changed before `NewState.write_back`.

        Returns:
            The flat outputs with the rows of all sessions, and their new state.

        Raises:
            ModelRunError: The model failed.
        """
        sizes = [session.sizes[self._dimension] for session in sessions]
        states = [list(session.state.values()) for session in sessions]
        rows = self._rows(model, sum(sizes))
        with torch.no_grad():
            for place in self._read:
                torch.cat([state[place] for state in states], out=rows[place])
        together = model.session_over(rows, {self._dimension: sum(sizes)}, initialise=False)
        args, kwargs = self._arguments(inputs)
        outputs = tensors_in(together.methods[self._method](*args, **kwargs))
        together.synchronize()  # says what the call refused, before any session has its state
        written = [(rows[place], [state[place] for state in states]) for place in self._written]
        return outputs, NewState(written, sizes)

    def _rows(self, model: Model, count: int) -> list[torch.Tensor]:
        """Returns the state of all together, in memory that the next batch uses again."""
        if self._memory is None or self._memory[0] is not model or self._memory[2] < count:
            grown = 1 << (count - 1).bit_length()
            with torch.inference_mode(False):
                state = [_new_rows(each, grown, model.device) for each in model.manifest.state]
            self._memory = (model, state, grown)
        return [tensor[:count] for tensor in self._memory[1]]


def _new_rows(state: StateTensor, count: int, device: torch.device) -> torch.Tensor:
    shape = [size for size in state.shape[1:] if not isinstance(size, Size)]
    dtype: torch.dtype = getattr(torch, state.dtype)
    return torch.empty((count, *shape), dtype=dtype, device=device)


@dataclass(frozen=True, eq=False)
class NewState:
    """The state of several sessions after a step.

    It has the tensors of the sessions themselves. So one that is closed meanwhile keeps none of the others from theirs.

    Attributes:
        written: For each tensor that was written, the rows of all sessions, and each session's own tensor.
        sizes: The rows of each session.
    """

    written: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]]
    sizes: list[int]

    def write_back(self) -> None:
        """Writes it into the sessions."""
        with torch.no_grad():
            for rows, own in self.written:
                for tensor, part in zip(own, rows.split(self.sizes)):
                    tensor.copy_(part)


def try_steps(copy: ModelCopy, dimension: Dimension, max_rows: int) -> Batching:
    """Finds out whether a sequence's answers and state depend on the sequences whose steps run with its own.

    The first recorded sequence is played several times, with rows of floating inputs rolled to make others, first one
    by one and then together: two of them, four, and so on.

    Args:
        copy: The method with state.
        dimension: The dimension whose rows may be independent, by the manifest.
        max_rows: The most rows of a batch.
    """
    model, name = copy.model, copy.method.name
    case = recorded_sequence(model, name)
    if case is None:
        return Batching.impossible("no recorded sequence shows whether those that run together influence one another")
    rows = case.state_sizes[dimension.name]
    kinds = [[_changed(copy.model, call, number) for call in case.calls] for number in range(_KINDS)]
    try:
        alone = [_play(copy, case, [inputs])[0] for inputs in kinds]
    except ModelRunError as error:  # rolled rows may make no sense to it
        return Batching.impossible(f"the model fails on changed inputs of the recorded sequence: {error.message}")
    if all(map(same_bits, alone[0], alone[1])):
        return Batching.impossible("other inputs do not change the answers of the recorded sequence")
    shown, bit_equal = False, True
    count = 2
    while count * rows <= max_rows and count <= _MOST_TRIED:
        chosen = [number % _KINDS for number in range(count)]
        try:
            answers = _play(copy, case, [kinds[number] for number in chosen])
        except ModelRunError as error:  # perhaps there is no memory for so many
            max_rows = count // 2 * rows
            if count == 2:
                return Batching.impossible(f"the model fails on two sequences together: {error.message}")
            break
        for number, answer in zip(chosen, answers):
            if problem := _difference(copy, case, alone[number], answer):
                return Batching.impossible(f"sequences influence one another: {problem}")
            bit_equal = bit_equal and all(map(same_bits, alone[number], answer))
        shown, count = True, 2 * count
    if not shown:
        return Batching.impossible(f"a batch has at most {max_rows} rows, which leaves no room for two sequences")
    return Batching(dimension, max_rows, bit_equal=bit_equal)


def _changed(model: Model, call: LoadedCall, number: int) -> _Flat:
    """Returns a recorded call's inputs; for a number other than 0, with rows of floating inputs rolled."""
    inputs = flat_inputs(model.manifest.method(call.method).call, call)
    return [rolled_rows(tensor, number) if number else tensor for tensor in inputs]


def _play(copy: ModelCopy, case: LoadedCase, sequences: Sequence[Sequence[_Flat]]) -> list[_Flat]:
    """Plays sequences in turns, the steps of the method together. Returns the outputs and the last state of each."""
    model, manifest = copy.model, copy.model.manifest
    step = JoinedSteps(copy.method, next(iter(case.state_sizes)))
    sessions = [model.session(**case.state_sizes) for _ in sequences]
    found: list[_Flat] = [[] for _ in sequences]
    for place, call in enumerate(case.calls):
        inputs = [sequence[place] for sequence in sequences]
        if len(sessions) > 1 and call.method == copy.method.name:
            outputs, state = step.run(model, sessions, joined(inputs))
            state.write_back()
            ends = list(itertools.accumulate(state.sizes))
            for answer, start, end in zip(found, [0, *ends], ends):
                answer += [output[start:end].clone() for output in outputs]
            continue
        arguments = arguments_of(manifest.method(call.method).call)
        for answer, session, given in zip(found, sessions, inputs):
            args, kwargs = arguments(given)
            answer += tensors_in(session.methods[call.method](*args, **kwargs))
    for answer, session in zip(found, sessions):
        answer += [tensor.clone() for tensor in session.state.values()]
        session.close()
    return found


def _difference(copy: ModelCopy, case: LoadedCase, alone: _Flat, together: _Flat) -> str | None:
    """Returns how the answers or the state of a sequence differ; None if they do not beyond their tolerance."""
    start = 0
    for call in case.calls:
        outputs = copy.model.manifest.method(call.method).call.outputs
        end = start + len(outputs)
        verdict = compare_outputs(outputs, alone[start:end], together[start:end])
        if not isinstance(verdict, Match):
            return verdict.message.splitlines()[0]
        start = end
    state = state_results(copy.model.manifest.state)
    verdict = compare_outputs(state, alone[start:], together[start:])
    return None if isinstance(verdict, Match) else verdict.message.splitlines()[0]
