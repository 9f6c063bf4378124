"""In ONNX, recurrent layers are ONNX's own LSTM, GRU and RNN, and ONNX Runtime computes with them what eager does."""

from __future__ import annotations

import onnx
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exportkit import ExportSpec
from exportkit.errors import ExportError
from tests.onnx.conversions import checked, convert_spec, run, session_of
from tests.recurrent.recurrent_models import Options, packed_inputs, packed_spec
from tests.recurrent.test_recurrent import answers

pytestmark = pytest.mark.slow

NODES = {"lstm": "LSTM", "gru": "GRU", "tanh": "RNN", "relu": "RNN"}


def agree(model: onnx.ModelProto, spec: ExportSpec, calls: list[list[Tensor]]) -> None:
    session = session_of(model)
    for inputs in calls:
        for found, eager in zip(run(session, inputs), answers(spec.model, inputs), strict=True):
            assert found.dtype == eager.dtype
            torch.testing.assert_close(found, eager, rtol=2e-5, atol=2e-5)


@settings(max_examples=10)
@given(
    st.builds(
        Options,
        kind=st.sampled_from(tuple(NODES)),
        layers=st.integers(1, 2),
        bidirectional=st.booleans(),
        bias=st.booleans(),
        batch_first=st.booleans(),
        states=st.booleans(),
        batched=st.booleans(),
    )
)
@example(Options("lstm", 2, bidirectional=True, projection=3, states=True))
@example(Options("lstm", projection=2, bias=False, batch_first=True))
def test_every_layer_is_onnxs_own_at_every_size(layer: Options) -> None:
    spec = layer.spec()
    model = checked(convert_spec(spec))
    nodes = [node for node in model.graph.node if node.op_type in ("LSTM", "GRU", "RNN")]
    assert [node.op_type for node in nodes] == [NODES[layer.kind]] * layer.layers
    assert not model.functions
    sizes = ((1, 1), (1, 9), (4, 1), (5, 31)) if layer.batched else ((1, 1), (1, 31))
    agree(model, spec, [layer.inputs(*size) for size in sizes])


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "longest"])
def test_packed_sequences_are_padded_and_give_their_lengths(whole: bool) -> None:
    spec = packed_spec(whole=whole)
    model = checked(convert_spec(spec))
    calls = []
    for size in ((1, 7), (1, 40), (9, 8), (30, 31)):
        x, lengths = packed_inputs(*size)
        calls += [[x, lengths.flip(0)], [x, lengths.clamp(max=4)]]
    agree(model, spec, calls)


def test_packed_sequences_with_projections_begin_where_each_direction_begins() -> None:
    spec = packed_spec()
    spec.model.first = Options("lstm", bidirectional=True, batch_first=True, projection=3).layer()
    spec.model.second = nn.GRU(6, 5, batch_first=True).eval()
    x, lengths = packed_inputs(9, 8)
    agree(checked(convert_spec(spec)), spec, [[x, lengths.flip(0)]])


def test_float64_is_refused_because_onnx_runtime_has_no_such_layer() -> None:
    with pytest.raises(ExportError, match="computes LSTM in float32 only, and this one is float64"):
        convert_spec(Options(dtype=torch.float64).spec())
