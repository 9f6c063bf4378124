"""Calls a model with its recorded cases before it is ready: it must answer them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from exportkit.errors import ExportkitError
from exportkit.package.manifest import Call, PackagedMethod
from exportkit.precision import with_tf32
from exportkit.runtime.loaded_cases import LoadedCall, LoadedCase
from exportkit.runtime.model import Model
from exportkit.serve.engine.model_replica import ModelReplica, tensors_in
from exportkit.serve.statuses import BackendError
from exportkit.sizes import has_state
from exportkit.verify.self_test import replay_case


def answer_cases(replica: ModelReplica, served: Sequence[PackagedMethod], *, compared: bool) -> None:
    """Replays the recorded cases of methods, each with state in a session. Those with edge values are for `verify`.

    Args:
        replica: The package on a device.
        served: The methods. Cases with state are replayed if one of them has state.
        compared: Whether the answers must be the recorded ones. With other weights than the package's they are not.

    Raises:
        BackendError: The model fails, or an answer is beyond its tolerance.
    """
    model = replica.model
    manifest, names = model.manifest, {method.name for method in served}
    stateful = any(method.state for method in served)
    for place, case in enumerate(manifest.cases):
        if names.isdisjoint(call.method for call in case.calls) or (has_state(manifest, case) and not stateful):
            continue
        if model.cases.file(case).edge_case:
            continue
        # Differences of rounding add up over a sequence. Else other models, which answer meanwhile, are left alone.
        rounded = with_tf32(manifest.provenance.tf32) if has_state(manifest, case) else nullcontext()
        try:
            with rounded:
                verdict = replay_case(model, place)
        except ExportkitError as error:
            raise BackendError(f"the model fails on its recorded case {place}: {error.message}") from error
        if compared and verdict.wrong:
            raise BackendError(
                f"the model answers its recorded case {place} wrongly on {model.device}: {verdict.message}",
                hint="`exportkit verify` says more about it.",
            )


def recorded_sequence(model: Model, method: str) -> LoadedCase | None:
    """Returns the first recorded case in which a method with state is called; None if there is none."""
    for place, case in enumerate(model.manifest.cases):
        if any(call.method == method for call in case.calls):
            return model.cases[place]
    return None


def flat_inputs(call: Call, recorded: LoadedCall) -> list[torch.Tensor]:
    """Returns the flat inputs of a recorded call."""
    positional = iter(recorded.args)
    values = [next(positional) if p.kind == "positional" else recorded.kwargs[p.name] for p in call.parameters]
    return tensors_in(values)
