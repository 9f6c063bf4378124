"""Finds out by the recorded cases whether the rows of one request, or of one sequence, influence another's."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence

import torch

from exportkit.errors import ModelRunError
from exportkit.package.case_files import state_results
from exportkit.package.manifest import ANY_VALUE, Dimension, TensorOutput
from exportkit.runtime.loaded_cases import LoadedCall, LoadedCase
from exportkit.runtime.model import Model
from exportkit.runtime.requests import joined
from exportkit.serve.engine.batchable import Batching
from exportkit.serve.engine.checked_request import arguments_of
from exportkit.serve.engine.joined_steps import JoinedSteps
from exportkit.serve.engine.replica import Replica, WorkerLostError, tensors_in
from exportkit.serve.engine.warm_up import flat_inputs, recorded_sequence
from exportkit.tensor_bytes import tensor_bytes
from exportkit.verify.compare import Match, compare_outputs

_TRIED_REQUESTS = 8  # that differ
_MAX_TRIED = 256  # requests in one call
_MAX_TRIED_BYTES = 256 << 20  # of the inputs of one call that tries a batch
_MOST_SEQUENCES = 32  # in one call
_KINDS = 4  # of sequences that differ, among those that are tried together

_Flat = list[torch.Tensor]

_log = logging.getLogger(__name__)


def try_batches(replica: Replica, method: str, dimension: Dimension, max_rows: int) -> Batching:
    """Finds out whether the answer to a row depends on the rows that are called with it.

    Rows of the recorded cases are called in small requests, then together, in batches of two requests, four, and so on.
    There are up to eight different requests. Where the cases have fewer rows, rows of floating inputs are rolled to
    make others; integers stay as they are, because an index in another place may be out of range there.

    Args:
        replica: The package on a device.
        method: The method.
        dimension: The dimension whose rows may be independent, by the manifest.
        max_rows: The most rows of a batch. There will be fewer if the model fails on so many.

    Raises:
        WorkerLostError: The worker process died.
    """
    outputs = replica.model.manifest.method(method).call.outputs
    if vague := [output.name for output in outputs if output.tolerance.atol >= ANY_VALUE]:
        return Batching.impossible(f"the values of `{vague[0]}` need not repeat, so its rows cannot be compared")
    fewest = max(dimension.min, 1)
    shown, bit_equal = False, True
    for requests in _requests(replica, method, fewest):
        answered = _answered(replica, method, requests)
        if not _differ([inputs for inputs, _ in answered]):
            continue
        if varying := _varying_output(outputs, [answer for _, answer in answered]):
            return Batching.impossible(f"the sizes of `{varying}` depend on the values of inputs")
        for count in _counts(answered, max_rows // fewest):
            inputs, alone = (_repeated(part, count) for part in zip(*answered))
            try:
                together = replica.call(method, inputs)
            except WorkerLostError:
                raise
            except ModelRunError as error:  # perhaps there is no memory for so many
                _log.warning(
                    "%s: batches have fewer than %d rows: %s",
                    replica.model.manifest.name,
                    count * fewest,
                    error.message,
                )
                if count == 2:
                    return Batching.impossible(f"the model fails on two requests together: {error.message}")
                max_rows = count // 2 * fewest
                break
            verdict = compare_outputs(outputs, alone, together)
            if not isinstance(verdict, Match):
                return Batching.impossible(f"rows influence one another: {verdict.message.splitlines()[0]}")
            shown, bit_equal = True, bit_equal and all(map(_same_bits, alone, together))
    if not shown:
        return Batching.impossible(
            "the recorded cases have no two different rows, which would show that they are independent"
        )
    return Batching(dimension, max_rows, bit_equal=bit_equal)


def _counts(answered: Sequence[tuple[_Flat, _Flat]], most: int) -> list[int]:
    """Returns how many requests to call together: 2, 4, 8, and so on, and as many as a batch holds."""
    size = sum(tensor.nbytes for inputs, _ in answered for tensor in inputs) // len(answered)
    most = min(most, _MAX_TRIED, max(2, _MAX_TRIED_BYTES // max(size, 1)))
    return [*(2**power for power in range(1, most.bit_length()) if 2**power < most), most]


def _requests(replica: Replica, method: str, fewest: int) -> Iterator[list[_Flat]]:
    """Yields small requests from the recorded cases: lists of those that fit together."""
    found: dict[object, list[_Flat]] = {}
    call = replica.model.manifest.method(method).call
    for recorded in replica.recorded(method):
        inputs = flat_inputs(call, recorded)
        pieces = found.setdefault(tuple(tensor.shape[1:] for tensor in inputs), [])
        for start in range(0, inputs[0].shape[0] - fewest + 1, fewest):
            pieces.append([tensor[start : start + fewest] for tensor in inputs])
    for pieces in found.values():
        missing = max(_TRIED_REQUESTS - len(pieces), 0) if pieces else 0
        rolled = [[_rolled_rows(tensor, 1 + n) for tensor in pieces[n % len(pieces)]] for n in range(missing)]
        yield [*pieces[:_TRIED_REQUESTS], *rolled]


def _answered(replica: Replica, method: str, requests: Iterable[_Flat]) -> list[tuple[_Flat, _Flat]]:
    """Returns the requests that the model can answer, with their answers: rolled rows may make no sense to it."""
    answers = []
    for inputs in requests:
        with contextlib.suppress(ModelRunError):
            answers.append((inputs, replica.call(method, inputs)))
    return answers


def _differ(requests: Sequence[_Flat]) -> bool:
    """Whether any two requests differ: equal rows would not show that they influence one another."""
    return any(not all(map(_same_bits, requests[0], other)) for other in requests[1:])


def _varying_output(outputs: Sequence[TensorOutput], answers: Sequence[_Flat]) -> str | None:
    """Returns an output whose rows have different sizes for requests of the same sizes."""
    for output, tensors in zip(outputs, zip(*answers)):
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            return output.name
    return None


def _repeated(parts: Sequence[_Flat], count: int) -> _Flat:
    """Puts `count` of the parts together along axis 0: the first, then from the last on."""
    chosen = [parts[-place % len(parts)] for place in range(count)]
    return joined([[tensor.contiguous() for tensor in part] for part in chosen])


def try_steps(model: Model, method: str, dimension: Dimension, max_rows: int) -> Batching:
    """Finds out whether a sequence's answers and state depend on the sequences whose steps run with its own.

    The first recorded sequence is played several times, with rows of floating inputs rolled to make others, first one
    by one and then together: two of them, four, and so on.

    Args:
        model: The package.
        method: The method with state.
        dimension: The dimension whose rows may be independent, by the manifest.
        max_rows: The most rows of a batch.
    """
    case = recorded_sequence(model, method)
    if case is None:
        return Batching.impossible("no recorded sequence shows whether those that run together influence one another")
    rows = case.state_sizes[dimension.name]
    kinds = [[_changed(model, call, number) for call in case.calls] for number in range(_KINDS)]
    try:
        alone = [_play(model, method, case, [inputs])[0] for inputs in kinds]
    except ModelRunError as error:  # rolled rows may make no sense to it
        return Batching.impossible(f"the model fails on changed inputs of the recorded sequence: {error.message}")
    if all(map(_same_bits, alone[0], alone[1])):
        return Batching.impossible("other inputs do not change the answers of the recorded sequence")
    shown, bit_equal = False, True
    count = 2
    while count * rows <= max_rows and count <= _MOST_SEQUENCES:
        chosen = [number % _KINDS for number in range(count)]
        try:
            answers = _play(model, method, case, [kinds[number] for number in chosen])
        except ModelRunError as error:  # perhaps there is no memory for so many
            max_rows = count // 2 * rows
            if count == 2:
                return Batching.impossible(f"the model fails on two sequences together: {error.message}")
            break
        for number, answer in zip(chosen, answers):
            if problem := _difference(model, case, alone[number], answer):
                return Batching.impossible(f"sequences influence one another: {problem}")
            bit_equal = bit_equal and all(map(_same_bits, alone[number], answer))
        shown, count = True, 2 * count
    if not shown:
        return Batching.impossible(f"a batch has at most {max_rows} rows, which leaves no room for two sequences")
    return Batching(dimension, max_rows, bit_equal=bit_equal)


def _changed(model: Model, call: LoadedCall, number: int) -> _Flat:
    """Returns a recorded call's inputs; for a number other than 0, with rows of floating inputs rolled."""
    inputs = flat_inputs(model.manifest.method(call.method).call, call)
    return [_rolled_rows(tensor, number) if number else tensor for tensor in inputs]


def _play(model: Model, method: str, case: LoadedCase, sequences: Sequence[Sequence[_Flat]]) -> list[_Flat]:
    """Plays sequences in turns, the steps of the method together. Returns the outputs and the last state of each."""
    manifest = model.manifest
    step = JoinedSteps(manifest.method(method), next(iter(case.state_sizes)))
    sessions = [model.session(**case.state_sizes) for _ in sequences]
    found: list[_Flat] = [[] for _ in sequences]
    for place, call in enumerate(case.calls):
        inputs = [sequence[place] for sequence in sequences]
        if len(sessions) > 1 and call.method == method:
            outputs = step.run(model, sessions, joined(inputs))
            ends = list(itertools.accumulate(each[0].shape[0] for each in inputs))
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


def _difference(model: Model, case: LoadedCase, alone: _Flat, together: _Flat) -> str | None:
    """Returns how the answers or the state of a sequence differ; None if they do not beyond their tolerance."""
    start = 0
    for call in case.calls:
        outputs = model.manifest.method(call.method).call.outputs
        end = start + len(outputs)
        verdict = compare_outputs(outputs, alone[start:end], together[start:end])
        if not isinstance(verdict, Match):
            return verdict.message.splitlines()[0]
        start = end
    state = state_results(model.manifest.state)
    verdict = compare_outputs(state, alone[start:], together[start:])
    return None if isinstance(verdict, Match) else verdict.message.splitlines()[0]


def _rolled_rows(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Returns rows of floating numbers with the same values in other places; others as they are."""
    if not rows.is_floating_point() or rows.dim() == 1:
        return rows
    return rows.flatten(1).roll(by, dims=1).view(rows.shape)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of equal dtypes and sizes have the same bits."""
    return torch.equal(tensor_bytes(one), tensor_bytes(other))
