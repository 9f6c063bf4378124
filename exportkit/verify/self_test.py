"""Replays the recorded cases of a loaded model in this process: what a host asks of a model before it uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from exportkit.errors import WrongResultError
from exportkit.package.case_files import result_keys, state_keys
from exportkit.package.manifest import Manifest
from exportkit.package.structure import flatten
from exportkit.precision import with_tf32
from exportkit.runtime.loaded_cases import LoadedCall, LoadedCase
from exportkit.runtime.model import Model
from exportkit.verify.judging import Judge
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Verdict
from exportkit.verify.replayer import ReplayTask, has_state

_Tensors = dict[str, torch.Tensor]


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
        verdict = replay_case(model, place)
        if verdict.wrong:
            raise WrongResultError(
                f"{model.manifest.name} answers its recorded case {place} wrongly on {model.device}: {verdict.message}",
                hint=f"`exportkit verify` says more about it, for the target {model.target.name} and for the others.",
            )


def replay_case(model: Model, place: int) -> Verdict:
    """Replays a recorded case of a loaded model, and judges the answers. Raises the errors of `Model.__call__`."""
    manifest, case = model.manifest, model.cases[place]
    recorded = manifest.cases[place]
    expected = _recorded(manifest, case)  # before the calls, which may write into inputs
    answers: _Tensors = {}
    structures = {}
    with torch.no_grad(), with_tf32(manifest.provenance.tf32), ExitStack() as stack:
        session = stack.enter_context(model.session(**case.state_sizes)) if has_state(manifest, recorded) else None
        for number, call in enumerate(case.calls):
            method = model.methods[call.method] if session is None else session.methods[call.method]
            given, structures[number] = _answers(manifest, method, call, number)
            answers |= given
        if session is not None:
            answers |= _named(state_keys(manifest.state), session.state)
    keys = state_keys(manifest.state)
    moves = {keys[name]: each for name, each in case.state_moves.items()}
    for number, call in enumerate(case.calls):
        keys = result_keys(number, manifest.method(call.method).call)
        moves |= {keys[name]: each for name, each in call.moves.items()}
    task = ReplayTask(f"case {place}", recorded, Path(), moves=moves)
    return Judge(manifest, VerifyOptions()).verdict(task, expected, answers, structures)


def _recorded(manifest: Manifest, case: LoadedCase) -> _Tensors:
    """Returns what eager answered, by the tensors' names in a file."""
    expected: _Tensors = {}
    for number, recorded in enumerate(case.calls):
        call = manifest.method(recorded.method).call
        results = dict(zip((each.name for each in call.outputs), _tensors(recorded.outputs)))
        written = {f"written.{name}": tensor for name, tensor in recorded.written.items()}
        expected |= _named(result_keys(number, call), results | written)
        expected |= _named(result_keys(number, call, reference=True), recorded.references)
    expected |= _named(state_keys(manifest.state), case.state)
    return expected | _named(state_keys(manifest.state, reference=True), case.state_references)


def _answers(manifest: Manifest, method: Callable[..., Any], recorded: LoadedCall, number: int) -> tuple[_Tensors, str]:
    """Makes a recorded call. Returns what it gave, by the names in a file, and the structure of its result."""
    call = manifest.method(recorded.method).call
    result = method(*recorded.args, **recorded.kwargs)
    node, leaves = flatten(result, _is_tensor)
    positional = iter(recorded.args)
    given = [next(positional) if each.kind == "positional" else recorded.kwargs[each.name] for each in call.parameters]
    written = {f"written.{each.name}": tensor for each, tensor in zip(call.inputs, _tensors(given)) if each.written}
    answers = {f"{number}.output.{i}": tensor.clone() for i, tensor in enumerate(leaves)}
    return answers | _named(result_keys(number, call), written), msgspec.json.encode(node).decode()


def _named(keys: Mapping[str, str], results: Mapping[str, torch.Tensor]) -> _Tensors:
    """Returns copies of the results that are there, by their names in a file: later calls write into the state."""
    return {key: results[name].clone() for name, key in keys.items() if name in results}


def _tensors(value: Any) -> list[torch.Tensor]:
    return flatten(value, _is_tensor)[1]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
