"""Calls a model with its recorded cases before it is ready: it must answer them."""

from __future__ import annotations

import torch

from exportkit.errors import ExportkitError
from exportkit.package.case_files import recorded_errors
from exportkit.package.manifest import Call, Manifest
from exportkit.runtime.loaded_cases import LoadedCall, LoadedCase
from exportkit.runtime.model import Model
from exportkit.serve.engine.model_replica import ModelReplica, tensors_in
from exportkit.serve.statuses import BackendError
from exportkit.verify.compare import Reference, compare_outputs
from exportkit.verify.outcomes import Verdict
from exportkit.verify.self_test import replay_case


def answer_cases(replica: ModelReplica, name: str, *, compared: bool) -> None:
    """Runs the recorded calls of a method without state.

    Args:
        replica: The package on a device.
        name: The method.
        compared: Whether the answers must be the recorded ones. With other weights than the package's they are not.

    Raises:
        BackendError: The model fails, or an answer is beyond its tolerance.
    """
    manifest = replica.model.manifest
    call, errors = manifest.method(name).call, recorded_errors(manifest.cases, name)
    what = "case" if len(manifest.methods) == 1 else f"call of {name}, number"
    for index, recorded in enumerate(replica.recorded(name)):
        try:
            answers = replica.call(name, flat_inputs(call, recorded))
        except ExportkitError as error:
            raise BackendError(f"the model fails on its recorded {what} {index}: {error.message}") from error
        if compared:
            reference = Reference(recorded.references, errors, moves=recorded.moves)
            eager = tensors_in(recorded.outputs)
            verdict = compare_outputs(call.outputs, eager, answers, reference=reference, sizes=recorded.sizes)
            _check(verdict, f"recorded {what} {index}", replica.device)


def answer_sequences(replica: ModelReplica, *, compared: bool) -> None:
    """Replays the recorded cases that use state, each in a session. The arguments and errors are `answer_cases`'."""
    model = replica.model
    for place in _with_state(model.manifest):
        if model.cases[place].edge_case:
            continue
        try:
            verdict = replay_case(model, place)
        except ExportkitError as error:
            raise BackendError(f"the model fails on its recorded case {place}: {error.message}") from error
        if compared:
            _check(verdict, f"recorded case {place}", model.device)


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


def _check(verdict: Verdict, what: str, device: torch.device) -> None:
    """Raises BackendError if answers are not the recorded ones, within their tolerances."""
    if verdict.wrong:
        raise BackendError(
            f"the model answers its {what} wrongly on {device}: {verdict.message}",
            hint="`exportkit verify` says more about it.",
        )


def flat_inputs(call: Call, recorded: LoadedCall) -> list[torch.Tensor]:
    """Returns the flat inputs of a recorded call."""
    positional = iter(recorded.args)
    values = [next(positional) if p.kind == "positional" else recorded.kwargs[p.name] for p in call.parameters]
    return tensors_in(values)
