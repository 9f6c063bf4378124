"""ONNX's own LSTM, GRU and RNN for the operators `exportkit_recurrent::*`.

ONNX orders the gates otherwise (iofc and zrh) and has one node a layer. Packed sequences do not exist there: they are
padded before the node, which gets their lengths. What is packed comes row by row in the order in which NonZero lists a
mask of the steps that a sequence has.

ONNX's LSTM has no projection. With r = W_hr m, which a step hands on, the gates take W_hh r = (W_hh W_hr) m, so that a
plain LSTM of m computes the same. What the first step is given, W_hh r_0, comes with its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.errors import ExportError
from exportkit.onnx.nodes import OP, TYPES, cast, ints, scalar
from exportkit.recurrent import NAMESPACE


def recurrent_translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Returns the part of torch.onnx's `custom_translation_table` for recurrent layers, if their library is loaded."""
    if not torch._C._jit_get_schemas_for_operator(f"{NAMESPACE}::lstm"):
        return {}
    operators = getattr(torch.ops, NAMESPACE)
    return {
        operators.lstm.default: _lstm,
        operators.gru.default: _one_state("GRU", (1, 0, 2), linear_before_reset=1),
        operators.rnn_tanh.default: _one_state("RNN", (0,), activation="Tanh"),
        operators.rnn_relu.default: _one_state("RNN", (0,), activation="Relu"),
        operators.pack.default: _pack,
        operators.unpack.default: _unpack,
    }


# --- layers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """A node of ONNX: its name, where it has torch's gates, and its attributes."""

    name: str
    gates: tuple[int, ...]
    attributes: Mapping[str, Any]
    activation: str | None = None


_LSTM = _Kind("LSTM", (0, 3, 1, 2), {})


def _lstm(
    input: Any,
    batch_sizes: Any,
    h: Any,
    c: Any,
    weights: Sequence[Any],
    biases: bool,
    layers: int,
    bidirectional: bool,
    requires_grad: bool,
) -> tuple[Any, ...]:
    return _stacked(_LSTM, input, batch_sizes, (h, c), weights, biases, layers, bidirectional)


def _one_state(
    name: str, gates: tuple[int, ...], activation: str | None = None, **attributes: Any
) -> Callable[..., tuple[Any, ...]]:
    kind = _Kind(name, gates, attributes, activation)

    def layer(
        input: Any,
        batch_sizes: Any,
        h: Any,
        weights: Sequence[Any],
        biases: bool,
        layers: int,
        bidirectional: bool,
        requires_grad: bool,
    ) -> tuple[Any, ...]:
        return _stacked(kind, input, batch_sizes, (h,), weights, biases, layers, bidirectional)

    return layer


def _stacked(
    kind: _Kind,
    input: Any,
    batch_sizes: Any,
    states: tuple[Any, ...],
    weights: Sequence[Any],
    biases: bool,
    layers: int,
    bidirectional: bool,
) -> tuple[Any, ...]:
    """Returns the output and the last states of layers over each other."""
    dtype = input.dtype
    if dtype == TYPES.DOUBLE:
        raise ExportError(
            f"ONNX Runtime computes {kind.name} in float32 only, and this one is float64", hint="Use --dtype float32."
        )
    input, states = cast(input, TYPES.FLOAT), tuple(cast(state, TYPES.FLOAT) for state in states)
    weights = [cast(weight, TYPES.FLOAT) for weight in weights]
    mask = None if batch_sizes is None else _mask(_dim(states[0], 1), batch_sizes)
    lengths = None
    if mask is not None:
        lengths = OP.Cast(_count(mask, 0), to=TYPES.INT32)
        input = _padded(mask, input, OP.ConstantOfShape(OP.Concat(OP.Shape(mask), OP.Shape(input, start=1), axis=0)))
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    last: list[list[Any]] = [[] for _ in states]
    for layer in range(layers):
        begin = layer * directions
        own = [weights[(begin + direction) * each : (begin + direction + 1) * each] for direction in range(directions)]
        first = [_rows(state, begin, begin + directions) for state in states]
        input, *ends = _layer(kind, input, lengths, first, own, biases)
        for all_of, end in zip(last, ends):
            all_of.append(end)
    ends = [OP.Concat(*of, axis=0) if layers > 1 else of[0] for of in last]
    if mask is not None:
        input = OP.GatherND(input, _places(mask))
    return tuple(cast(each, dtype) for each in (input, *ends))


def _layer(
    kind: _Kind, input: Any, lengths: Any, first: list[Any], weights: Sequence[Sequence[Any]], biases: bool
) -> tuple[Any, ...]:
    """Returns the output [T, B, directions * size] of one layer and its last states [directions, B, size].

    The input is [T, B, features], the states before the first step are [directions, B, size], and the weights are those
    of each direction, perhaps with biases. Without lengths, all sequences have T steps.
    """
    directions = len(weights)
    projections = [of[-1] for of in weights] if len(weights[0]) > 2 + 2 * biases else None
    into = [_ordered(of[0], kind.gates) for of in weights]
    onto = [_ordered(of[1], kind.gates) for of in weights]
    if projections is not None:
        input = OP.Concat(input, *(_at_first_step(input, first[0], d, lengths) for d in range(directions)), axis=2)
        nothing = [OP.Mul(each, scalar(0.0, TYPES.FLOAT)) for each in onto]
        into = [
            OP.Concat(into[d], *(onto[e] if d == e else nothing[e] for e in range(directions)), axis=1)
            for d in range(directions)
        ]
        onto = [OP.MatMul(each, projection) for each, projection in zip(onto, projections)]
        first = [OP.Mul(first[1], scalar(0.0, TYPES.FLOAT)), first[1]]
    bias = None
    if biases:
        both = [[_ordered(b, kind.gates) for b in of[2:4]] for of in weights]
        bias = _each_direction([OP.Concat(*of, axis=0) for of in both])
    attributes = dict(kind.attributes)
    if kind.activation is not None:
        attributes["activations"] = [kind.activation] * directions
    answer = getattr(OP, kind.name)(
        input,
        _each_direction(into),
        _each_direction(onto),
        bias,
        lengths,
        *first,
        hidden_size=int(weights[0][1].shape[0]) // len(kind.gates),
        direction="bidirectional" if directions == 2 else "forward",
        **attributes,
    )
    every, *ends = answer  # [T, directions, B, size]
    if projections is not None:
        matrices = _each_direction([OP.Transpose(each, perm=[1, 0]) for each in projections])
        every, ends[0] = OP.MatMul(every, matrices), OP.MatMul(ends[0], matrices)
    output = OP.Transpose(every, perm=[0, 2, 1, 3])
    return (OP.Reshape(output, ints(0, 0, -1)), *ends)


def _at_first_step(input: Any, states: Any, direction: int, lengths: Any) -> Any:
    """Returns [T, B, P]: a direction's state where its first step is, and zeros elsewhere."""
    state = _rows(states, direction, direction + 1)
    steps = OP.Unsqueeze(_range(_dim(input, 0)), ints(1, 2))
    first = _int(0)
    if direction == 1:
        first = OP.Sub(_dim(input, 0), _int(1))
        if lengths is not None:
            first = OP.Unsqueeze(OP.Sub(OP.Cast(lengths, to=TYPES.INT64), _int(1)), ints(0, 2))
    return OP.Mul(OP.Cast(OP.Equal(steps, first), to=TYPES.FLOAT), state)


def _ordered(weight: Any, gates: tuple[int, ...]) -> Any:
    """Puts the gates, which lie one after the other in the first dimension, into ONNX's order."""
    if len(gates) == 1:
        return weight
    size = int(weight.shape[0]) // len(gates)
    return OP.Concat(*(_rows(weight, gate * size, (gate + 1) * size) for gate in gates), axis=0)


def _each_direction(parts: Sequence[Any]) -> Any:
    whole = [OP.Unsqueeze(part, ints(0)) for part in parts]
    return OP.Concat(*whole, axis=0) if len(whole) > 1 else whole[0]


# --- packed sequences -------------------------------------------------------------------------------------------------


def _pack(input: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    if batch_first:
        input = OP.Transpose(input, perm=[1, 0, *range(2, len(input.shape))])
    steps = OP.Unsqueeze(_range(_dim(input, 0)), ints(1))
    mask = OP.Less(steps, OP.Unsqueeze(lengths, ints(0)))
    longest = OP.ReduceMax(lengths, keepdims=1)
    return OP.GatherND(input, _places(mask)), OP.Slice(_count(mask, 1), ints(0), longest)


def _unpack(data: Any, batch_sizes: Any, padding: float, length: Any, batch: Any) -> tuple[Any, Any]:
    size = [OP.Reshape(_as_value(each), ints(-1)) for each in (length, batch)]
    mask = _mask(_as_value(batch), batch_sizes)
    shape = OP.Concat(*size, OP.Shape(data, start=1), axis=0)
    filled = OP.Expand(OP.Cast(scalar(padding, TYPES.FLOAT), to=data.dtype), shape)
    return _padded(mask, data, filled), _count(mask, 0)


def _mask(batch: Any, batch_sizes: Any) -> Any:
    """Returns [longest, batch]: whether a sequence has a step. Those of a batch are sorted, the longest first."""
    return OP.Less(OP.Unsqueeze(_range(batch), ints(0)), OP.Unsqueeze(batch_sizes, ints(1)))


def _places(mask: Any) -> Any:
    """Returns the steps and sequences [N, 2] of packed rows."""
    return OP.Transpose(OP.NonZero(mask), perm=[1, 0])


def _padded(mask: Any, data: Any, padding: Any) -> Any:
    return OP.ScatterND(padding, _places(mask), data)


def _count(mask: Any, axis: int) -> Any:
    return OP.ReduceSum(OP.Cast(mask, to=TYPES.INT64), ints(axis), keepdims=0)


# --- small nodes ------------------------------------------------------------------------------------------------------


def _rows(value: Any, begin: int, end: int) -> Any:
    return OP.Slice(value, ints(begin), ints(end), ints(0))


def _range(end: Any) -> Any:
    return OP.Range(_int(0), OP.Squeeze(end), _int(1))


def _dim(value: Any, axis: int) -> Any:
    return OP.Squeeze(OP.Shape(value, start=axis, end=axis + 1))


def _as_value(size: Any) -> Any:
    return _int(size) if isinstance(size, int) else size


def _int(number: int) -> Any:
    return OP.Constant(value_int=number)
