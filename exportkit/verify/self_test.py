"""Replays the recorded cases of a loaded model in this process: what a host asks of a model before it uses it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from exportkit.errors import WrongResultError
from exportkit.package.case_files import named_results, state_keys
from exportkit.package.structure import arguments
from exportkit.precision import with_tf32
from exportkit.runtime.loaded_cases import answers_of
from exportkit.runtime.model import Model
from exportkit.runtime.session import Session
from exportkit.sizes import has_state, state_sizes
from exportkit.verify.judging import Judge
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Verdict
from exportkit.verify.replayer import ReplayTask


def self_test(model: Model) -> None:
    """Replays the recorded cases of a loaded model, and compares its answers as `exportkit verify` does.

    A case of a model with state is a sequence of calls in a session of its own; what it writes and the state at its end
    are compared, too. The answers are those of the package's weights, so test a model before `swap_weights`. Meanwhile,
    float32 is rounded to TF32 exactly if eager could when the cases were recorded, in the whole process.

    Args:
        model: What `exportkit.load` returned.

    Raises:
        WrongResultError: An answer is wrong. The message says which, and by how much.
        PackageError: A case is damaged.
        ModelRunError: The model fails on a case.
        ModelClosedError: The model was closed.
    """
    for place in range(len(model.cases)):
        with with_tf32(model.manifest.provenance.tf32):
            verdict = replay_case(model, place)
        if verdict.wrong:
            raise WrongResultError(
                f"{model.manifest.name} answers its recorded case {place} wrongly on {model.device}: {verdict.message}",
                hint="After `swap_weights` that is right: recorded answers are of the package's own weights. Otherwise "
                f"`exportkit verify` says more about it, for the target {model.target.name} and for the others.",
            )


def replay_case(model: Model, place: int) -> Verdict:
    """Replays a recorded case of a loaded model, and judges the answers. Raises the errors of `Model.__call__`."""
    manifest, case = model.manifest, model.manifest.cases[place]
    file = model.cases.file(case)
    answers: dict[str, torch.Tensor] = {}
    structures = {}
    with torch.no_grad(), ExitStack() as stack:
        session: Session | None = None
        if has_state(manifest, case):
            session = stack.enter_context(model.session(**state_sizes(manifest, case)))
        for number, recorded in enumerate(case.calls):
            call, method = manifest.method(recorded.method).call, (session or model).methods[recorded.method]
            # Copies: calls may write into their inputs, and do so only where these are aligned.
            names = (f"{number}.input.{index}" for index in range(len(call.inputs)))
            inputs = [file.tensors[name].to(model.device, copy=True) for name in names]
            args, kwargs = arguments(call, inputs)
            given, structures[number] = answers_of(number, call, method(*args, **kwargs), inputs)
            answers |= given
        if session is not None:
            answers |= named_results(state_keys(manifest.state), session.state)
    task = ReplayTask(f"case {place}", case, Path(), moves=file.moves)
    return Judge(manifest, VerifyOptions()).verdict(task, file.tensors, answers, structures)
