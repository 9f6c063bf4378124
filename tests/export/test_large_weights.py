"""What is done with the weights of a large model: they are moved, upcast and copied to the host once, or by parts."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exportkit.export.models.placement import prepared
from exportkit.export.record import host_copies, upcast
from exportkit.export.record.host_copies import HostCopies
from exportkit.export.record.upcast import Upcast
from exportkit.spec import ExportSpec


class Products(nn.Module):
    """Multiplies with parameters in all ways that language models do, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(1000, 256)
        self.same = nn.Linear(256, 256)
        self.wider = nn.Linear(256, 512, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 512, 128))
        self.places = nn.Parameter(torch.randn(1, 512, 256))
        self.tied = self.words.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        x = torch.tanh(self.same(self.words(tokens) + self.places[:, : tokens.shape[1]]))
        mixed = torch.bmm(self.wider(x).expand(4, -1, -1), self.experts).sum(0)
        return nn.functional.linear(x, self.tied), mixed, x @ self.tied.t()[:, 3:70]


def wide(model: nn.Module, tokens: Tensor, mode: Upcast) -> tuple[Tensor, ...]:
    weights = {name: mode.parameter(tensor) for name, tensor in model.named_parameters()}
    with torch.no_grad(), mode:
        return torch.func.functional_call(model, weights, (tokens,))


def test_a_large_parameter_is_upcast_by_blocks_and_its_views_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = Products().bfloat16(), torch.randint(0, 1000, (1, 9))
    whole = wide(model, tokens, Upcast(torch.float64, torch.bfloat16))
    monkeypatch.setattr(upcast, "KEPT_BYTES", 1 << 17)
    greatest = 0
    plain_cast = upcast.cast

    def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        nonlocal greatest
        made = plain_cast(tensor, dtype)
        greatest = max(greatest, made.nbytes if made is not tensor else 0)
        return made

    monkeypatch.setattr(upcast, "cast", cast)
    parts = wide(model, tokens, Upcast(torch.float64, torch.bfloat16, lazily=True))
    for one, other in zip(whole, parts, strict=True):
        assert other.dtype is torch.float64
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    assert greatest <= 512 * 128 * 8  # of one expert: the table of words would take four times that


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv1d": (nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 9, 9)),
    "conv3d": (nn.Conv3d(4, 6, 3, bias=False), (2, 4, 5, 5, 5)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5)),
    "batch norm": (nn.BatchNorm1d(4), (2, 4, 9)),
    "group norm": (nn.GroupNorm(2, 4), (2, 4, 9)),
    "layer norm": (nn.LayerNorm(9), (2, 4, 9)),
    "rms norm": (nn.RMSNorm(9), (2, 4, 9)),
    "prelu": (nn.PReLU(4), (2, 4, 9)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "linear": (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), (2, 5, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_a_large_model_are_upcast_where_they_are_used(name: str) -> None:
    layer, shape = LAYERS[name]
    model, x = copy.deepcopy(layer).bfloat16().eval(), torch.randn(shape, dtype=torch.float64)
    mode = Upcast(torch.float64, torch.bfloat16, lazily=True)
    before = torch.backends.cudnn.enabled
    with_buffers = {name: upcast.cast(tensor, torch.float64) for name, tensor in model.named_buffers()}
    weights = {name: mode.parameter(tensor) for name, tensor in model.named_parameters()}
    with torch.no_grad(), mode:
        found = torch.func.functional_call(model, {**weights, **with_buffers}, (x,))
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    assert torch.backends.cudnn.enabled is before


def test_a_large_parameter_that_is_written_after_a_view_of_it_is_refused() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            view = self.weight.t()
            self.weight.add_(1)
            return x @ view

    mode = Upcast(torch.float64, torch.bfloat16, lazily=True)
    with pytest.raises(NotImplementedError, match="is written, and views"):
        wide(Writing(), torch.ones(2, 4, dtype=torch.bfloat16), mode)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("number", torch.tensor(2))
        self.calls: list[str] = []

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.calls.append("moved")
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.table.sum()


def test_a_model_that_moves_is_not_copied_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    copied: list[torch.dtype] = []
    plain = Tensor.__deepcopy__

    def noted(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        copied.append(tensor.dtype)
        return plain(tensor, memo)

    monkeypatch.setattr(Tensor, "__deepcopy__", noted)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", noted)
    spec = ExportSpec(model=model, example_inputs=(torch.ones(1, 8),))
    with prepared(spec, torch.device("cpu"), torch.float16) as placed:
        moved: Any = placed.model
        assert moved.first.weight.dtype is torch.float16
        assert moved.second.weight is moved.first.weight
        assert moved.table.dtype is torch.float16
        assert (moved.calls, model.calls) == (["moved"], [])
    assert copied == [torch.int64]  # what stays as it is
    assert model.first.weight.dtype is torch.float32


def test_a_tensor_of_a_gpu_is_copied_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(host_copies, "elements", lambda tensor: made.append(tensor) or memoryview(b"abc"))

    def on_gpu(address: int) -> Any:
        return SimpleNamespace(
            device=torch.device("cuda", 0),
            data_ptr=lambda: address,
            dtype=torch.float32,
            shape=(3,),
            stride=lambda: (1,),
        )

    copies, weight, other = HostCopies(), on_gpu(512), on_gpu(1024)
    contents = [copies.elements(tensor) for tensor in (weight, weight, on_gpu(512), other)]
    assert made == [weight, other]
    assert contents[0] is contents[1]
    copies.clear()
    copies.elements(weight)
    assert made == [weight, other, weight]
