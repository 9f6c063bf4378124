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

import onnx_ir
import torch
from onnxscript import opset18

from exportkit.errors import ExportError
from exportkit.recurrent import NAMESPACE

_OP: Any = opset18  # its types know less than torch.onnx's recorder does
_TYPES = onnx_ir.DataType


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
    if dtype == _TYPES.DOUBLE:
        raise ExportError(
            f"ONNX Runtime computes {kind.name} in float32 only, and this one is float64", hint="Use --dtype float32."
        )
    input, states = _cast(input, _TYPES.FLOAT), tuple(_cast(state, _TYPES.FLOAT) for state in states)
    weights = [_cast(weight, _TYPES.FLOAT) for weight in weights]
    mask = None if batch_sizes is None else _mask(_dim(states[0], 1), batch_sizes)
    lengths = None
    if mask is not None:
        lengths = _OP.Cast(_count(mask, 0), to=_TYPES.INT32)
        input = _padded(
            mask, input, _OP.ConstantOfShape(_OP.Concat(_OP.Shape(mask), _OP.Shape(input, start=1), axis=0))
        )
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
    ends = [_OP.Concat(*of, axis=0) if layers > 1 else of[0] for of in last]
    if mask is not None:
        input = _OP.GatherND(input, _places(mask))
    return tuple(_cast(each, dtype) for each in (input, *ends))


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
        input = _OP.Concat(input, *(_at_first_step(input, first[0], d, lengths) for d in range(directions)), axis=2)
        nothing = [_OP.Mul(each, _number(0.0)) for each in onto]
        into = [
            _OP.Concat(into[d], *(onto[e] if d == e else nothing[e] for e in range(directions)), axis=1)
            for d in range(directions)
        ]
        onto = [_OP.MatMul(each, projection) for each, projection in zip(onto, projections)]
        first = [_OP.Mul(first[1], _number(0.0)), first[1]]
    bias = None
    if biases:
        both = [[_ordered(b, kind.gates) for b in of[2:4]] for of in weights]
        bias = _each_direction([_OP.Concat(*of, axis=0) for of in both])
    attributes = dict(kind.attributes)
    if kind.activation is not None:
        attributes["activations"] = [kind.activation] * directions
    answer = getattr(_OP, kind.name)(
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
        matrices = _each_direction([_OP.Transpose(each, perm=[1, 0]) for each in projections])
        every, ends[0] = _OP.MatMul(every, matrices), _OP.MatMul(ends[0], matrices)
    output = _OP.Transpose(every, perm=[0, 2, 1, 3])
    return (_OP.Reshape(output, _OP.Constant(value_ints=[0, 0, -1])), *ends)


def _at_first_step(input: Any, states: Any, direction: int, lengths: Any) -> Any:
    """Returns [T, B, P]: a direction's state where its first step is, and zeros elsewhere."""
    state = _rows(states, direction, direction + 1)
    steps = _OP.Unsqueeze(_range(_dim(input, 0)), _ints(1, 2))
    first = _int(0)
    if direction == 1:
        first = _OP.Sub(_dim(input, 0), _int(1))
        if lengths is not None:
            first = _OP.Unsqueeze(_OP.Sub(_OP.Cast(lengths, to=_TYPES.INT64), _int(1)), _ints(0, 2))
    return _OP.Mul(_OP.Cast(_OP.Equal(steps, first), to=_TYPES.FLOAT), state)


def _ordered(weight: Any, gates: tuple[int, ...]) -> Any:
    """Puts the gates, which lie one after the other in the first dimension, into ONNX's order."""
    if len(gates) == 1:
        return weight
    size = int(weight.shape[0]) // len(gates)
    return _OP.Concat(*(_rows(weight, gate * size, (gate + 1) * size) for gate in gates), axis=0)


def _each_direction(parts: Sequence[Any]) -> Any:
    whole = [_OP.Unsqueeze(part, _ints(0)) for part in parts]
    return _OP.Concat(*whole, axis=0) if len(whole) > 1 else whole[0]


# --- packed sequences -------------------------------------------------------------------------------------------------


def _pack(input: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    if batch_first:
        input = _OP.Transpose(input, perm=[1, 0, *range(2, len(input.shape))])
    steps = _OP.Unsqueeze(_range(_dim(input, 0)), _ints(1))
    mask = _OP.Less(steps, _OP.Unsqueeze(lengths, _ints(0)))
    longest = _OP.ReduceMax(lengths, keepdims=1)
    return _OP.GatherND(input, _places(mask)), _OP.Slice(_count(mask, 1), _ints(0), longest)


def _unpack(data: Any, batch_sizes: Any, padding: float, length: Any, batch: Any) -> tuple[Any, Any]:
    size = [_OP.Reshape(_as_value(each), _ints(-1)) for each in (length, batch)]
    mask = _mask(_as_value(batch), batch_sizes)
    shape = _OP.Concat(*size, _OP.Shape(data, start=1), axis=0)
    filled = _OP.Expand(_OP.Cast(_number(padding), to=data.dtype), shape)
    return _padded(mask, data, filled), _count(mask, 0)


def _mask(batch: Any, batch_sizes: Any) -> Any:
    """Returns [longest, batch]: whether a sequence has a step. Those of a batch are sorted, the longest first."""
    return _OP.Less(_OP.Unsqueeze(_range(batch), _ints(0)), _OP.Unsqueeze(batch_sizes, _ints(1)))


def _places(mask: Any) -> Any:
    """Returns the steps and sequences [N, 2] of packed rows."""
    return _OP.Transpose(_OP.NonZero(mask), perm=[1, 0])


def _padded(mask: Any, data: Any, padding: Any) -> Any:
    return _OP.ScatterND(padding, _places(mask), data)


def _count(mask: Any, axis: int) -> Any:
    return _OP.ReduceSum(_OP.Cast(mask, to=_TYPES.INT64), _ints(axis), keepdims=0)


# --- small nodes ------------------------------------------------------------------------------------------------------


def _rows(value: Any, begin: int, end: int) -> Any:
    return _OP.Slice(value, _ints(begin), _ints(end), _ints(0))


def _range(end: Any) -> Any:
    return _OP.Range(_int(0), _OP.Squeeze(end), _int(1))


def _dim(value: Any, axis: int) -> Any:
    return _OP.Squeeze(_OP.Shape(value, start=axis, end=axis + 1))


def _as_value(size: Any) -> Any:
    return _int(size) if isinstance(size, int) else size


def _int(number: int) -> Any:
    return _OP.Constant(value_int=number)


def _ints(*numbers: int) -> Any:
    return _OP.Constant(value_ints=list(numbers))


def _number(number: float) -> Any:
    return _OP.Constant(value_float=float(number))


def _cast(value: Any, dtype: onnx_ir.DataType) -> Any:
    return value if value.dtype == dtype else _OP.Cast(value, to=dtype)
