"""Runs eager again and rounds otherwise: what right code may answer to the calls of a session."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from exportkit.errors import ExportError, UsageError
from exportkit.export.record.eager_run import EagerRun, run_eagerly
from exportkit.export.record.rounding import Rounded
from exportkit.export.torch_patches.patched import patched


@dataclass(frozen=True)
class PerturbedAnswers:
    """What a run answered.

    Attributes:
        calls: The results of each call, by name.
        state: The state after them, by name.
        undefined: As `Rounded.undefined`.
        blends: As `Rounded.blends`.
    """

    calls: Sequence[Mapping[str, torch.Tensor]]
    state: Mapping[str, torch.Tensor]
    undefined: bool
    blends: bool


def _attention_with_modes() -> AbstractContextManager[None]:
    """Lets flex_attention call its operator itself: torch compiles the call, and refuses to where there is a mode."""
    attention = sys.modules.get("torch.nn.attention.flex_attention")
    if attention is None:
        return nullcontext()
    return patched("flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", lambda _: True)


def perturbed_answers(eager_run: EagerRun, seed: int) -> PerturbedAnswers | None:
    """Answers the calls of a session once more. None if the model refuses what it computes then.

    Args:
        eager_run: What eager answered.
        seed: Of the roundings.
    """
    models = {call.model for call in eager_run.answered}
    weights = [
        tensor
        for model in models
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    ]
    mode = Rounded(seed, eager_run.calls[0].bound.tensors[0].device, weights)
    try:
        with torch.no_grad(), _attention_with_modes(), mode:
            again = run_eagerly(eager_run.model, eager_run.calls)
    except (ExportError, UsageError):
        return None
    finally:
        if mode.met_control_flow:
            torch.compiler.reset()  # torch.cond was compiled in the mode, and would be refused from now on
    return PerturbedAnswers([each.eager for each in again.answered], again.after.eager, mode.undefined, mode.blends)
