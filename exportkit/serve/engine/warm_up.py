"""Calls a model with its recorded cases before it is ready: it must answer them, and its rows must be independent."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from exportkit.errors import ExportkitError, ModelRunError
from exportkit.package.case_files import recorded_errors
from exportkit.package.manifest import ANY_VALUE, Accuracy, Call, Dimension, Manifest, TensorOutput
from exportkit.runtime.loaded_cases import LoadedCall, LoadedCase
from exportkit.runtime.model import Model
from exportkit.runtime.requests import joined
from exportkit.serve.engine.batchable import Batching
from exportkit.serve.engine.model_copy import ModelCopy, SharedModel, WorkerLostError, tensors_in
from exportkit.serve.statuses import BackendError
from exportkit.tensor_bytes import tensor_bytes
from exportkit.verify.compare import Match, Reference, compare_outputs
from exportkit.verify.self_test import replay_case

_TRIED_REQUESTS = 8  # that differ
_MAX_TRIED = 256  # requests in one call
_MAX_TRIED_BYTES = 256 << 20  # of the inputs of one call that tries a batch

_Flat = list[torch.Tensor]

_log = logging.getLogger(__name__)


def answer_cases(copy: ModelCopy, *, compared: bool) -> None:
    """Runs the recorded cases.

    Args:
        copy: The model.
        compared: Whether the answers must be the recorded ones. With other weights than the package's they are not.

    Raises:
        BackendError: The model fails, or an answer is beyond its tolerance.
    """
    manifest, method = copy.model.manifest, copy.method
    errors = recorded_errors(manifest.cases, method.name)
    what = "case" if len(manifest.methods) == 1 else f"call of {method.name}, number"
    for index, recorded in enumerate(copy.recorded()):
        try:
            answers = copy.call(flat_inputs(method.call, recorded))
        except ExportkitError as error:
            raise BackendError(f"the model fails on its recorded {what} {index}: {error.message}") from error
        if compared:
            _compare(method.call, recorded, answers, errors, f"recorded {what} {index}", copy.device)


def answer_sequences(model: SharedModel, *, compared: bool) -> None:
    """Replays the recorded cases that use state, each in a session. The arguments and errors are `answer_cases`'."""
    for place in _with_state(model.model.manifest):
        if model.model.cases[place].trouble:
            continue
        try:
            verdict = replay_case(model.model, place)
        except ExportkitError as error:
            raise BackendError(f"the model fails on its recorded case {place}: {error.message}") from error
        if compared and not isinstance(verdict, Match):
            raise BackendError(
                f"the model answers its recorded case {place} wrongly on {model.device}: {verdict.message}",
                hint="`exportkit verify` says more about it.",
            )


def recorded_sequence(model: Model, method: str) -> LoadedCase | None:
    """Returns the first recorded case in which a method with state is called; None if there is none."""
    for place in _with_state(model.manifest):
        if any(call.method == method for call in model.manifest.cases[place].calls):
            return model.cases[place]
    return None


def _with_state(manifest: Manifest) -> list[int]:
    """Returns the places of the recorded cases that use state."""
    stateful = {method.name for method in manifest.methods if method.state}
    return [place for place, case in enumerate(manifest.cases) if any(call.method in stateful for call in case.calls)]


def _compare(
    call: Call,
    recorded: LoadedCall,
    answers: _Flat,
    errors: Mapping[str, Sequence[Accuracy]],
    what: str,
    device: torch.device,
) -> None:
    """Raises BackendError if answers are not the recorded ones, within their tolerances."""
    verdict = compare_outputs(
        call.outputs,
        tensors_in(recorded.outputs),
        answers,
        reference=Reference(recorded.references, errors),
        sizes=recorded.sizes,
    )
    if not isinstance(verdict, Match):
        raise BackendError(
            f"the model answers its {what} wrongly on {device}: {verdict.message}",
            hint="`exportkit verify` says more about it.",
        )


def try_batches(copy: ModelCopy, dimension: Dimension, max_rows: int) -> Batching:
    """Finds out whether the answer to a row depends on the rows that are called with it.

    Rows of the recorded cases are called in small requests, then together, in batches of two requests, four, and so on.
    There are up to eight different requests. Where the cases have fewer rows, rows of floating inputs are rolled to
    make others; integers stay as they are, because an index in another place may be out of range there.

    Args:
        copy: The model.
        dimension: The dimension whose rows may be independent, by the manifest.
        max_rows: The most rows of a batch. There will be fewer if the model fails on so many.

    Raises:
        WorkerLostError: The worker process died.
    """
    outputs = copy.method.call.outputs
    if vague := [output.name for output in outputs if output.tolerance.atol >= ANY_VALUE]:
        return Batching.impossible(f"the values of `{vague[0]}` need not repeat, so its rows cannot be compared")
    fewest = max(dimension.min, 1)
    shown, bit_equal = False, True
    for requests in _requests(copy, fewest):
        answered = _answered(copy, requests)
        if not _differ([inputs for inputs, _ in answered]):
            continue
        if varying := _varying_output(outputs, [answer for _, answer in answered]):
            return Batching.impossible(f"the sizes of `{varying}` depend on the values of inputs")
        for count in _counts(answered, max_rows // fewest):
            inputs, alone = (_repeated(part, count) for part in zip(*answered))
            try:
                together = copy.call(inputs)
            except WorkerLostError:
                raise
            except ModelRunError as error:  # perhaps there is no memory for so many
                _log.warning(
                    "%s: batches have fewer than %d rows: %s", copy.model.manifest.name, count * fewest, error.message
                )
                if count == 2:
                    return Batching.impossible(f"the model fails on two requests together: {error.message}")
                max_rows = count // 2 * fewest
                break
            verdict = compare_outputs(outputs, alone, together)
            if not isinstance(verdict, Match):
                return Batching.impossible(f"rows influence one another: {verdict.message.splitlines()[0]}")
            shown, bit_equal = True, bit_equal and all(map(same_bits, alone, together))
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


def _requests(copy: ModelCopy, fewest: int) -> Iterator[list[_Flat]]:
    """Yields small requests from the recorded cases: lists of those that fit together."""
    found: dict[object, list[_Flat]] = {}
    for recorded in copy.recorded():
        inputs = flat_inputs(copy.method.call, recorded)
        pieces = found.setdefault(tuple(tensor.shape[1:] for tensor in inputs), [])
        for start in range(0, inputs[0].shape[0] - fewest + 1, fewest):
            pieces.append([tensor[start : start + fewest] for tensor in inputs])
    for pieces in found.values():
        missing = max(_TRIED_REQUESTS - len(pieces), 0) if pieces else 0
        rolled = [[rolled_rows(tensor, 1 + n) for tensor in pieces[n % len(pieces)]] for n in range(missing)]
        yield [*pieces[:_TRIED_REQUESTS], *rolled]


def _answered(copy: ModelCopy, requests: Iterable[_Flat]) -> list[tuple[_Flat, _Flat]]:
    """Returns the requests that the model can answer, with their answers: rolled rows may make no sense to it."""
    answers = []
    for inputs in requests:
        with contextlib.suppress(ModelRunError):
            answers.append((inputs, copy.call(inputs)))
    return answers


def _differ(requests: Sequence[_Flat]) -> bool:
    """Whether any two requests differ: equal rows would not show that they influence one another."""
    return any(not all(map(same_bits, requests[0], other)) for other in requests[1:])


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


def flat_inputs(call: Call, recorded: LoadedCall) -> list[torch.Tensor]:
    """Returns the flat inputs of a recorded call."""
    positional = iter(recorded.args)
    values = [next(positional) if p.kind == "positional" else recorded.kwargs[p.name] for p in call.parameters]
    return tensors_in(values)


def rolled_rows(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Returns rows of floating numbers with the same values in other places; others as they are."""
    if not rows.is_floating_point() or rows.dim() == 1:
        return rows
    return rows.flatten(1).roll(by, dims=1).view(rows.shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of equal dtypes and sizes have the same bits."""
    return torch.equal(tensor_bytes(one), tensor_bytes(other))
