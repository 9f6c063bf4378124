"""Recurrent layers export with any length and batch, and compute what eager computes, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

from exportkit import ExportSpec
from exportkit.errors import ExportError
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolved import EagerModel
from exportkit.export.trace.trace import ready_to_trace
from exportkit.export.trace.trace_method import trace_with_torch_export
from exportkit.recurrent import fakes
from tests.conftest import DEVICES
from tests.drawn import examples
from tests.recurrent.recurrent_models import FEATURES, SIZE, Options, packed_inputs, packed_spec
from tests.subprocesses import run_python

ALL = {"lstm", "gru", "rnn_tanh", "rnn_relu", "pack", "unpack"}


def traced(spec: ExportSpec, device: str = "cpu") -> torch.export.ExportedProgram:
    with ready_to_trace(EagerModel(spec=spec), TraceOptions(), torch.device(device)) as (_, tasks):
        return trace_with_torch_export(*tasks["forward"])[0]


def called(program: torch.export.ExportedProgram) -> set[str]:
    """The names of our operators that a program calls."""
    found = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return {target._schema.name.partition("::")[2] for target in found if target.namespace == "exportkit_recurrent"}


def answers(module: Any, inputs: Any, mode: Any = torch.no_grad) -> list[Tensor]:
    with mode():
        return tree_leaves(module(*inputs))


@st.composite
def options(draw: st.DrawFn) -> Options:
    kind = draw(st.sampled_from(("lstm", "gru", "tanh", "relu")))
    return Options(
        kind=kind,
        layers=draw(st.integers(1, 3)),
        bidirectional=draw(st.booleans()),
        bias=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        projection=draw(st.sampled_from((0, 3))) if kind == "lstm" else 0,
        states=draw(st.booleans()),
        batched=draw(st.booleans()),
        dtype=draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.float16))),
        frozen=draw(st.booleans()),
    )


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(20))
@given(layer=options())
@example(layer=Options("relu", 2, batch_first=True))  # of which the last bits differ between trained and frozen
@example(layer=Options("relu", 2, batch_first=True, frozen=True))
def test_every_layer_has_eagers_bits_at_every_size(layer: Options, device: str) -> None:
    spec = layer.spec()
    program = traced(spec, device)
    eager_model = spec.model.to(device)
    assert called(program) == {{"tanh": "rnn_tanh", "relu": "rnn_relu"}.get(layer.kind, layer.kind)}
    module = program.module(check_guards=False)
    for batch, length in ((1, 1), (1, 9), (4, 1), (9, 8), (5, 31)) if layer.batched else ((1, 1), (1, 31)):
        inputs = [tensor.to(device) for tensor in layer.inputs(batch, length)]
        found, eager = answers(module, inputs), answers(eager_model, inputs)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, eager, strict=True))


@pytest.mark.slow_but("any-order-longest*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "longest"])
@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "any-order"])
def test_packed_sequences_have_eagers_bits_at_every_size(whole: bool, sorted: bool, device: str) -> None:
    spec = packed_spec(whole=whole, sorted=sorted)
    program = traced(spec, device)
    eager_model = spec.model.to(device)
    assert called(program) == {"lstm", "gru", "pack", "unpack"}
    module = program.module(check_guards=False)
    for batch, length in ((1, 7), (1, 40), (9, 8), (30, 31)):
        x, lengths = (tensor.to(device) for tensor in packed_inputs(batch, length))
        lengths = lengths.sort(descending=True).values if sorted else lengths[torch.randperm(batch, device=device)]
        for given_lengths in (lengths, lengths.clamp(max=4), torch.ones_like(lengths)):
            found, eager = answers(module, (x, given_lengths)), answers(eager_model, (x, given_lengths))
            assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))


def test_what_torch_refuses_to_pack_is_refused_with_the_reason() -> None:
    module = traced(packed_spec(sorted=True)).module(check_guards=False)
    x, _ = packed_inputs(3, 7)
    for lengths, said in (
        ([3, 5, 7], "lengths must not grow, got 5 after 3; enforce_sorted=False"),
        ([7, 5, 0], "each length must be 1 to 7, got 0"),
        ([8, 5, 2], "each length must be 1 to 7, got 8"),
    ):
        with pytest.raises(RuntimeError, match=said), torch.no_grad():
            module(x, torch.tensor(lengths))


def test_functions_of_torch_are_kept_whole_too_and_put_back() -> None:
    layer = nn.GRU(FEATURES, SIZE)
    before = torch.gru, torch._VF.gru, nn.GRU.forward

    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(layer._flat_weights)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            h = x.new_zeros(1, x.shape[1], SIZE)
            one = torch.gru(x, h, list(self.weights), True, 1, 0.0, False, False, False)
            two = torch._VF.gru(one[0] @ one[0].mT @ x, h, list(self.weights), True, 1, 0.0, False, False, False)
            return (*one, *two)

    spec = ExportSpec(Functions(), (torch.randn(7, 3, FEATURES),), dynamic_shapes={"x": {0: "length[1:64]"}})
    program = traced(spec)
    assert called(program) == {"gru"}
    x = torch.randn(20, 3, FEATURES)
    assert all(map(torch.equal, answers(program.module(check_guards=False), (x,)), answers(spec.model, (x,))))
    assert before == (torch.gru, torch._VF.gru, nn.GRU.forward)


class Differentiated(nn.Module):
    """A layer that the model differentiates itself: torch unrolls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(FEATURES, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.layer(x)[0].detach()


class Autocast(Differentiated):
    """A layer in another dtype than its weights'."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x)[0]


@pytest.mark.slow_but("Autocast")
@pytest.mark.parametrize("model", [Differentiated, Autocast])
def test_a_layer_that_is_more_than_its_answer_is_left_to_torch(model: type[nn.Module]) -> None:
    x = torch.randn(7, 3, FEATURES)
    assert not called(traced(ExportSpec(model().eval(), (x,))))
    with pytest.raises(ExportError, match=r"self\.layer(.|\n)*needs x:0 == 7") as refused:
        traced(ExportSpec(model().eval(), (x,), dynamic_shapes={"x": {0: "length[2:64]"}}))
    assert str(refused.value.hint).startswith("Write --dynamic x:0=7 (x:0 is always 7).")


def test_a_quantized_layer_is_refused_as_such() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(FEATURES, SIZE)), {nn.LSTM}, torch.qint8)
    with pytest.raises(ExportError, match="quantization"):
        traced(ExportSpec(model.eval(), (torch.randn(7, 3, FEATURES),)))


def test_the_operators_refuse_what_their_fakes_refuse_and_more() -> None:
    operators = fakes.registered()
    layer = Options().layer()
    x, h = torch.randn(7, 3, FEATURES), torch.zeros(1, 3, SIZE)
    weights = list(layer._flat_weights)

    def lstm(*, x: Tensor = x, h: Tensor = h, weights: Any = weights, batch_sizes: Tensor | None = None) -> Any:
        with torch.no_grad():
            return operators.lstm(x, batch_sizes, h, h, weights, True, 1, False, True)

    for said, changed in (
        ("3 weights are not 4 for each of 1 layers", {"weights": weights[:3]}),
        ("input has 5 features", {"x": x[..., :5]}),
        ("at least one step", {"x": x[:0]}),
        ("must be .T, B, input., got 2 dimensions", {"x": x[0]}),
        (r"an initial state must be \[1, 3, size\]", {"h": h[:, :2]}),
        ("one dtype", {"h": h.double()}),
        ("one dtype", {"weights": [weight.double() for weight in weights]}),
        ("batch_sizes must be int64", {"x": x[0], "batch_sizes": torch.tensor([3.0])}),
        ("data has 3 rows, the batch sizes add up to more", {"x": x[0], "batch_sizes": torch.tensor([3, 1])}),
        ("data has 3 rows, the batch sizes add up to more", {"x": x[0], "batch_sizes": torch.full((5,), 2**62)}),
        ("must not grow, got 2 at 1", {"x": x[0], "batch_sizes": torch.tensor([1, 2])}),
    ):
        with pytest.raises(RuntimeError, match=said):
            lstm(**changed)
    with pytest.raises(RuntimeError, match="Expected sequence length to be larger than 0"):
        layer(x[:0])  # as eager does
    packed = pack_padded_sequence(x, [7, 4, 1])
    with torch.no_grad():
        assert torch.equal(lstm(x=packed.data, batch_sizes=packed.batch_sizes)[0], layer(packed)[0].data)


def test_a_process_that_loaded_a_package_traces_such_layers(tmp_path: Path) -> None:
    """The C++ runtime says by an operator what is loaded, and the library is loaded while torch traces."""
    code = """
from pathlib import Path
import torch
from exportkit import ExportSpec
from exportkit.export.artifact import export_program
from exportkit.runtime import native
native.why_unusable()
export_program(ExportSpec(torch.nn.GRU(3, 2), (torch.zeros(5, 2, 3),)), Path("out.pt2"))
"""
    run_python(code, cwd=tmp_path, compiler=True)
    assert (tmp_path / "out.pt2").exists()
