"""The experts of a mixture, in products whose sizes do not depend on which experts the tokens go to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exportkit.transformers.step_context import ATTENTION, current


def run_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes a mixture by transformers' interface of experts.

    One token of each row reads the weights of its experts only. A prompt, which reaches most experts anyway, is
    computed by all of them: that takes more operations, and no memory for copies of weights.

    Args:
        experts: The module with the weights of all experts.
        hidden_states: [tokens, width].
        top_k_index: The experts of each token, [tokens, k].
        top_k_weights: Their weights.
    """
    if current().single:
        from transformers.integrations.moe import batched_mm_experts_forward

        chosen: Tensor = batched_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        return chosen
    return run_all_experts(experts, hidden_states, top_k_index, top_k_weights)


def run_all_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes a mixture with all experts for each token. Arguments as for `run_experts`."""
    names = ("gate_up_proj", "down_proj") if experts.has_gate else ("up_proj", "down_proj")
    inner = _products(experts, names[0], hidden_states.expand(experts.num_experts, *hidden_states.shape))
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    each = _products(experts, names[1], inner)  # [experts, tokens, width]
    if getattr(experts, "has_post_expert_norm", False):  # since transformers 5.18
        each = experts.post_expert_norm(each)
    weights = each.new_zeros((hidden_states.shape[0], experts.num_experts))
    weights = weights.scatter(1, top_k_index, top_k_weights.to(each.dtype))
    return torch.einsum("te,etw->tw", weights, each).to(hidden_states.dtype)


def _products(experts: Any, name: str, x: Tensor) -> Tensor:
    weight = getattr(experts, name)
    product = torch.bmm(x, weight if experts.is_transposed else weight.transpose(1, 2))
    return product + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else product


def register_experts() -> None:
    """Makes these experts known to transformers under the attention's name, in versions that have an interface."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register(ATTENTION, run_experts)
