"""Loads the operators' library, and registers the fakes: what the operators return for tensors without data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from exportkit.errors import HostError
from exportkit.libraries import LIBRARY_DIR, load_library
from exportkit.recurrent import LIBRARIES, NAMESPACE

Size = int | torch.SymInt


@functools.cache
def registered() -> Any:
    """Loads the library and registers the fakes, once. Returns the operators, `torch.ops.exportkit_recurrent`.

    Raises:
        HostError: The library was never built.
    """
    if "cpu" not in LIBRARIES:
        raise HostError(
            f"the library of recurrent layers is not built: {LIBRARY_DIR} has no libexportkit_recurrent.so",
            hint="Run `pip install --no-build-isolation -e .` (or `make setup`) with a C++ compiler.",
        )
    # This may be asked for while torch traces. Another thread has none of its modes, which would see the operators that
    # the runtime asks for what is loaded.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(load_library, LIBRARIES["cpu"], defines=[NAMESPACE]).result()
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
    return getattr(torch.ops, NAMESPACE)


def _layer(
    op: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Checks what csrc/recurrent checks and is known without data. The first state has the size of the outputs."""
    directions = 2 if bidirectional else 1
    projects = len(states) == 2 and states[0].shape[-1] != states[1].shape[-1]
    each = 2 + 2 * biases + projects
    if len(weights) != layers * directions * each:
        raise ValueError(f"{op}: {len(weights)} weights are not {each} for each of {layers * directions} layers")
    rank = 3 if batch_sizes is None else 2
    if input.dim() != rank:
        raise ValueError(f"{op}: input must have {rank} dimensions, got {input.dim()}")
    torch._check(input.shape[-1] == weights[0].shape[1], lambda: f"{op}: the weights take other features than input's")
    for state in states:
        torch._check(state.dim() == 3 and state.shape[0] == layers * directions, lambda: f"{op}: a state's shape")
        if batch_sizes is None:
            torch._check(state.shape[1] == input.shape[1], lambda: f"{op}: a state's batch is not that of input")
    if len({tensor.dtype for tensor in (input, *states, *weights)}) > 1:
        raise TypeError(f"{op}: input, states and weights must have one dtype")
    out = input.new_empty((*input.shape[:-1], directions * states[0].shape[-1]))
    return (out, *(torch.empty_like(state, memory_format=torch.contiguous_format) for state in states))


def _lstm(
    input: Tensor,
    batch_sizes: Tensor | None,
    h: Tensor,
    c: Tensor,
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    bidirectional: bool,
    requires_grad: bool,
) -> tuple[Tensor, ...]:
    return _layer("lstm", input, batch_sizes, (h, c), weights, biases, layers, bidirectional)


def _one_state(op: str) -> Callable[..., tuple[Tensor, ...]]:
    def fake(
        input: Tensor,
        batch_sizes: Tensor | None,
        h: Tensor,
        weights: Sequence[Tensor],
        biases: bool,
        layers: int,
        bidirectional: bool,
        requires_grad: bool,
    ) -> tuple[Tensor, ...]:
        return _layer(op, input, batch_sizes, (h,), weights, biases, layers, bidirectional)

    return fake


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    context = torch.library.get_ctx()
    rows, longest = context.new_dynamic_size(min=1), context.new_dynamic_size(min=1)
    torch._check(longest <= input.shape[1 if batch_first else 0])
    torch._check(lengths.shape[0] == input.shape[0 if batch_first else 1])
    return input.new_empty((rows, *input.shape[2:])), lengths.new_empty((longest,))


def _unpack(data: Tensor, batch_sizes: Tensor, padding: float, length: Size, batch: Size) -> tuple[Tensor, Tensor]:
    return data.new_empty((length, batch, *data.shape[1:])), batch_sizes.new_empty((batch,))


_FAKES: dict[str, Callable[..., Any]] = {
    "lstm": _lstm,
    **{op: _one_state(op) for op in ("gru", "rnn_tanh", "rnn_relu")},
    "pack": _pack,
    "unpack": _unpack,
}
