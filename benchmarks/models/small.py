"""Small models, for benchmarks/small_models.py: a step of a GRU, a perceptron, a keyword spotter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exportkit import ExportSpec

BATCH = "batch[1:256]"


class Step(nn.Module):
    """One step of two GRU cells over 40 features, as a phoneme recogniser takes each 10 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(40, 128), nn.GRUCell(128, 128)])
        self.head = nn.Linear(128, 48)

    def forward(self, features: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Takes features [batch, 40] and the two states [batch, 128]; returns scores [batch, 48] and the states."""
        first = self.cells[0](features, first)
        second = self.cells[1](first, second)
        return self.head(second).log_softmax(1), first, second


class Perceptron(nn.Sequential):
    """Three hidden layers of 256 for a table of 64 columns."""

    def __init__(self) -> None:
        sizes = ((64, 256), (256, 256), (256, 256))
        hidden = [each for a, b in sizes for each in (nn.Linear(a, b), nn.LayerNorm(b), nn.GELU())]
        super().__init__(*hidden, nn.Linear(256, 10))


class Spotter(nn.Module):
    """DS-CNN (arXiv:1711.07128): twelve keywords in 49 frames of 10 cepstral coefficients."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, width, (10, 4), 2, (5, 1), bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        for _ in range(4):
            layers += [
                nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            layers += [nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 12)

    def forward(self, frames: Tensor) -> Tensor:
        """Takes frames [batch, 1, 49, 10] and returns scores [batch, 12]."""
        return self.head(self.layers(frames).mean((2, 3)))


def _ready(model: nn.Module) -> nn.Module:
    """Gives the normalizations statistics that change something."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=generator) / 4)
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return model.eval()


def _spec(model: nn.Module, name: str, **inputs: Tensor) -> ExportSpec:
    shapes = {each: {0: BATCH} for each in inputs}
    return ExportSpec(model=_ready(model), name=name, example_inputs=tuple(inputs.values()), dynamic_shapes=shapes)


def step() -> ExportSpec:
    torch.manual_seed(0)
    features, state = torch.randn(2, 40), torch.randn(2, 128)
    return _spec(Step(), "step", features=features, first=state, second=state.clone())


def perceptron() -> ExportSpec:
    torch.manual_seed(0)
    return _spec(Perceptron(), "perceptron", input=torch.randn(2, 64))


def spotter() -> ExportSpec:
    torch.manual_seed(0)
    return _spec(Spotter(), "spotter", frames=torch.randn(2, 1, 49, 10))
