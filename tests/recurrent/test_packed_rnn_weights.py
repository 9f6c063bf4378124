"""Weights of recurrent layers in blocks, as cuDNN reads them: the graph computes the same with parts of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from exportkit import ExportSpec
from exportkit.export.compile import packed_rnn_weights
from exportkit.export.compile.packed_rnn_weights import Layer, lay_out
from tests.recurrent.recurrent_models import FEATURES, SIZE, both, packed_inputs
from tests.recurrent.test_recurrent import traced

aten = torch.ops.aten


def module_of(spec: ExportSpec) -> torch.fx.GraphModule:
    module = traced(spec).module(check_guards=False)
    assert isinstance(module, torch.fx.GraphModule)
    return module


def in_reverse(layer: Layer) -> list[int]:
    """Where weights begin that lie from the last to the first."""
    sizes = [weight.numel() for weight in layer.weights]
    return [sum(sizes[place + 1 :]) for place in range(len(sizes))]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rnn_weights, "_is_of_cudnn", lambda weight: True)
    monkeypatch.setattr(packed_rnn_weights, "cudnn_starts", in_reverse)


def targets(module: torch.fx.GraphModule, target: Any) -> list[torch.fx.Node]:
    return list(module.graph.find_nodes(op="call_function", target=target))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_layers_take_parts_of_blocks_and_compute_the_same() -> None:
    module, inputs = module_of(both()), packed_inputs(4, 9)
    expected = module(*inputs)
    computed = lay_out(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), expected)
    blocks = targets(module, aten.cat.default)
    assert len([block for block in blocks if block in computed]) == 3  # a block for each layer
    for part in targets(module, aten.slice.Tensor):
        assert part.args[0] not in blocks or (part.args[0] in computed and part not in computed)
    weights = {node for node in module.graph.nodes if node.op == "get_attr" and "rnn" in str(node.target)}
    assert weights
    assert all(user in computed for weight in weights for user in weight.users)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_weights_that_lie_in_another_order_keep_their_values() -> None:
    layer = nn.GRU(FEATURES, SIZE).eval()
    layer.weight_ih_l0 = nn.Parameter(layer.weight_ih_l0.detach().T.contiguous().T)
    module, x = module_of(ExportSpec(layer, (torch.randn(7, 3, FEATURES),))), torch.randn(7, 3, FEATURES)
    expected = module(x)
    assert lay_out(module.graph)
    module.recompile()
    torch.testing.assert_close(module(x), expected)


def test_weights_that_cudnn_does_not_read_stay() -> None:
    module = module_of(ExportSpec(nn.LSTM(FEATURES, SIZE).eval(), (torch.randn(7, 3, FEATURES),)))
    assert not lay_out(module.graph)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_cudnn_reads_a_block_as_torch_lays_it_out(kind: type[nn.RNNBase], bidirectional: bool) -> None:
    layer = kind(FEATURES, SIZE, 2, bidirectional=bidirectional).eval().to("cuda")  # torch lays them out here
    module = traced(ExportSpec(layer, (torch.randn(7, 3, FEATURES, device="cuda"),)), "cuda").module(check_guards=False)
    [found] = packed_rnn_weights._layers(module.graph)
    first = min(weight.data_ptr() for weight in layer._flat_weights)
    starts = [(weight.data_ptr() - first) // weight.element_size() for weight in layer._flat_weights]
    assert packed_rnn_weights.cudnn_starts(found) == starts
