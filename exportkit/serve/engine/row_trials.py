"""Finds out by the recorded cases whether the rows of one request, or of one sequence, influence another's."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from exportkit.errors import ModelRunError
from exportkit.package.case_files import state_results
from exportkit.package.manifest import ANY_VALUE, Dimension, PackagedMethod, TensorOutput
from exportkit.runtime.loaded_cases import LoadedCall, LoadedCase
from exportkit.runtime.model import Model
from exportkit.runtime.requests import joined
from exportkit.serve.engine.batchable import Batching
from exportkit.serve.engine.joined_steps import JoinedSteps
from exportkit.serve.engine.model_replica import ModelReplica, WorkerLostError, arguments_of, tensors_in
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


class _AloneError(Exception):
    """Each request runs alone. The message is the reason."""


def try_rows(replica: ModelReplica, method: PackagedMethod, dimension: Dimension, max_rows: int) -> Batching:
    """Finds out whether the answer to a row depends on the rows that are called with it.

    Rows of the recorded cases are called in small requests, then together: two requests, four, and so on. There are up
    to eight different requests. Where the cases have fewer rows, rows of floating inputs are rolled to make others;
    integers stay as they are, because an index in another place may be out of range there. Of a method with state, the
    first recorded sequence is played so, and its state is compared, too.

    Args:
        replica: The package on a device. A method with state is called in this process.
        method: The method.
        dimension: The dimension whose rows may be independent, by the manifest.
        max_rows: The most rows of a batch. There will be fewer if the model fails on so many.

    Raises:
        WorkerLostError: The worker process died.
    """
    try:
        return (_try_steps if method.state else _try_requests)(replica, method, dimension, max_rows)
    except _AloneError as error:
        return Batching.impossible(str(error))


_Pairs = Sequence[tuple[_Flat, _Flat]]  # what was answered alone and together


def _grow(
    outputs: Sequence[TensorOutput], counts: Iterable[int], together: Callable[[int], _Pairs], whose: str
) -> tuple[int | None, bool]:
    """Calls more and more requests or sequences together.

    Returns:
        How many the model could not run; None: it could run all. And whether answers had the same bits.
    """
    bit_equal = True
    for count in counts:
        try:
            pairs = together(count)
        except WorkerLostError:
            raise
        except ModelRunError as error:  # perhaps there is no memory for so many
            if count == 2:
                raise _AloneError(f"the model fails on two {whose} together: {error.message}") from error
            _log.warning("batches have fewer than %d %s: %s", count, whose, error.message)
            return count, bit_equal
        for alone, answers in pairs:
            verdict = compare_outputs(outputs, alone, answers)
            if not isinstance(verdict, Match):
                what = "rows" if whose == "requests" else whose
                raise _AloneError(f"{what} influence one another: {verdict.message.splitlines()[0]}")
            bit_equal = bit_equal and all(map(_same_bits, alone, answers))
    return None, bit_equal


# --- without state ----------------------------------------------------------------------------------------------------


def _try_requests(replica: ModelReplica, method: PackagedMethod, dimension: Dimension, max_rows: int) -> Batching:
    outputs = method.call.outputs
    if vague := [output.name for output in outputs if output.tolerance.atol >= ANY_VALUE]:
        raise _AloneError(f"the values of `{vague[0]}` need not repeat, so its rows cannot be compared")
    fewest = max(dimension.min, 1)
    shown, bit_equal = False, True
    for requests in _requests(replica, method, fewest):
        answered = _answered(replica, method, requests)
        if all(all(map(_same_bits, answered[0][0], inputs)) for inputs, _ in answered[1:]):
            continue  # equal rows would not show that they influence one another
        for output, answers in zip(outputs, zip(*(answer for _, answer in answered))):
            if len({answer.shape[1:] for answer in answers}) > 1:
                raise _AloneError(f"the sizes of `{output.name}` depend on the values of inputs")
        together = partial(_called_together, replica, method, answered)
        failed, equal = _grow(outputs, _counts(answered, max_rows // fewest), together, "requests")
        max_rows = max_rows if failed is None else failed // 2 * fewest
        shown, bit_equal = True, bit_equal and equal
    if not shown:
        raise _AloneError("the recorded cases have no two different rows, which would show that they are independent")
    return Batching(dimension, max_rows, bit_equal=bit_equal)


def _called_together(
    replica: ModelReplica, method: PackagedMethod, answered: Sequence[tuple[_Flat, _Flat]], count: int
) -> _Pairs:
    """Calls so many of the requests together: the first, then from the last on."""
    chosen = [answered[-place % len(answered)] for place in range(count)]
    inputs, alone = (joined([[tensor.contiguous() for tensor in each] for each in part]) for part in zip(*chosen))
    return [(alone, replica.call(method.name, inputs))]


def _counts(answered: Sequence[tuple[_Flat, _Flat]], most: int) -> list[int]:
    """Returns how many requests to call together: 2, 4, 8, and so on, and as many as a batch holds."""
    size = sum(tensor.nbytes for inputs, _ in answered for tensor in inputs) // len(answered)
    most = min(most, _MAX_TRIED, max(2, _MAX_TRIED_BYTES // max(size, 1)))
    return [*(2**power for power in range(1, most.bit_length()) if 2**power < most), most]


def _requests(replica: ModelReplica, method: PackagedMethod, fewest: int) -> Iterator[list[_Flat]]:
    """Yields small requests from the recorded cases: lists of those that fit together."""
    found: dict[object, list[_Flat]] = {}
    for recorded in replica.recorded(method.name):
        inputs = flat_inputs(method.call, recorded)
        pieces = found.setdefault(tuple(tensor.shape[1:] for tensor in inputs), [])
        for start in range(0, inputs[0].shape[0] - fewest + 1, fewest):
            pieces.append([tensor[start : start + fewest] for tensor in inputs])
    for pieces in found.values():
        missing = max(_TRIED_REQUESTS - len(pieces), 0) if pieces else 0
        rolled = [[_rolled_rows(tensor, 1 + n) for tensor in pieces[n % len(pieces)]] for n in range(missing)]
        yield [*pieces[:_TRIED_REQUESTS], *rolled]


def _answered(replica: ModelReplica, method: PackagedMethod, requests: Iterable[_Flat]) -> list[tuple[_Flat, _Flat]]:
    """Returns the requests that the model can answer, with their answers: rolled rows may make no sense to it."""
    answers = []
    for inputs in requests:
        with contextlib.suppress(ModelRunError):
            answers.append((inputs, replica.call(method.name, inputs)))
    return answers


# --- with state -------------------------------------------------------------------------------------------------------


def _try_steps(replica: ModelReplica, method: PackagedMethod, dimension: Dimension, max_rows: int) -> Batching:
    model = replica.model
    if (case := recorded_sequence(model, method.name)) is None:
        raise _AloneError("no recorded sequence shows whether those that run together influence one another")
    rows = case.state_sizes[dimension.name]
    kinds = [[_changed(model, call, number) for call in case.calls] for number in range(_KINDS)]
    try:
        alone = [_play(model, method, case, [inputs])[0] for inputs in kinds]
    except ModelRunError as error:  # rolled rows may make no sense to it
        raise _AloneError(f"the model fails on changed inputs of the recorded sequence: {error.message}") from error
    if all(map(_same_bits, alone[0], alone[1])):
        raise _AloneError("other inputs do not change the answers of the recorded sequence")
    if 2 * rows > max_rows:
        raise _AloneError(f"a batch has at most {max_rows} rows, which leaves no room for two sequences")

    def together(count: int) -> _Pairs:
        chosen = [number % _KINDS for number in range(count)]
        return list(zip([alone[number] for number in chosen], _play(model, method, case, [kinds[n] for n in chosen])))

    most = min(max_rows // rows, _MOST_SEQUENCES)
    counts = [1 << power for power in range(1, most.bit_length())]
    outputs = [output for call in case.calls for output in model.manifest.method(call.method).call.outputs]
    failed, bit_equal = _grow([*outputs, *state_results(model.manifest.state)], counts, together, "sequences")
    return Batching(dimension, max_rows if failed is None else failed // 2 * rows, bit_equal=bit_equal)


def _changed(model: Model, call: LoadedCall, number: int) -> _Flat:
    """Returns a recorded call's inputs; for a number other than 0, with rows of floating inputs rolled."""
    inputs = flat_inputs(model.manifest.method(call.method).call, call)
    return [_rolled_rows(tensor, number) if number else tensor for tensor in inputs]


def _play(model: Model, method: PackagedMethod, case: LoadedCase, sequences: Sequence[Sequence[_Flat]]) -> list[_Flat]:
    """Plays sequences in turns, the steps of the method together. Returns the outputs and the last state of each."""
    manifest = model.manifest
    step = JoinedSteps(method, next(iter(case.state_sizes)))
    sessions = [model.session(**case.state_sizes) for _ in sequences]
    found: list[_Flat] = [[] for _ in sequences]
    for place, call in enumerate(case.calls):
        inputs = [sequence[place] for sequence in sequences]
        if len(sessions) > 1 and call.method == method.name:
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


def _rolled_rows(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Returns rows of floating numbers with the same values in other places; others as they are."""
    if not rows.is_floating_point() or rows.dim() == 1:
        return rows
    return rows.flatten(1).roll(by, dims=1).view(rows.shape)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of equal dtypes and sizes have the same bits."""
    return torch.equal(tensor_bytes(one), tensor_bytes(other))
