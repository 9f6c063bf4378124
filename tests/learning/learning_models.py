"""Models that learn: parameters as state, with a step of their own and with an optimizer of torch.optim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exportkit import ExportSpec, Method, training

BATCH = {0: "batch[2:32]"}


class Regression(torch.nn.Module):
    """Parameters are plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(8, 16)
        self.b = torch.nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Takes [batch, 8]; returns [batch, 1]."""
        y: Tensor = self.b(self.a(x).relu())
        return y


class SelfTaught(Regression):
    """Writes its own parameters and their momentum."""

    DECAY = 0.9

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in list(self.named_parameters()):
            self.register_buffer("momentum_" + name.replace(".", "_"), torch.zeros_like(parameter))

    def predict(self, x: Tensor) -> Tensor:
        return self(x)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        parameters = dict(self.named_parameters())
        loss = mean_square(self, x, y)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for (name, parameter), gradient in zip(parameters.items(), gradients):
                moment = self.get_buffer("momentum_" + name.replace(".", "_"))
                moment.mul_(self.DECAY).add_(gradient)
                parameter.sub_(0.01 * moment)
        return loss.detach()


class StaleMoment(SelfTaught):
    """Forgets what came before."""

    DECAY = 0.0


def mean_square(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(model(x), y)


def batch(rows: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    """A task that can be learnt."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=drawn)
    return x, x[:, :1] * x[:, 1:2] + 0.5 * x[:, 2:3]


def self_taught(kind: type[SelfTaught] = SelfTaught) -> ExportSpec:
    """A model with `predict` and `step`."""
    x, y = batch()
    return ExportSpec(
        model=kind(),
        methods={
            "predict": Method(example_inputs=(x,), dynamic_shapes={"x": BATCH}),
            "step": Method(example_inputs=(x, y), dynamic_shapes={"x": BATCH, "y": BATCH}),
        },
        state=("momentum_*", "a.*", "b.*"),
    )


def stale_moment() -> ExportSpec:
    return self_taught(StaleMoment)


def adam() -> ExportSpec:
    """Gradients of several batches make one step of AdamW, with a limited norm and a rate that is given."""
    model = Regression()
    groups = [{"params": model.a.parameters(), "weight_decay": 0.1}, {"params": model.b.parameters()}]
    return _learner(model, torch.optim.AdamW(groups), accumulates=True, clip_norm=1.0, lr_input=True)


def sgd() -> ExportSpec:
    """Weight decay, momentum, and only one layer that learns."""
    model = Regression()
    return _learner(model, torch.optim.SGD(model.b.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-2))


def _learner(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> ExportSpec:
    x, y = batch()
    step = Method(example_inputs=(x, y), dynamic_shapes={"x": BATCH, "y": BATCH})
    forward = Method(example_inputs=(x,), dynamic_shapes={"x": BATCH})
    return training.spec(model, optimizer, mean_square, step=step, methods={"forward": forward}, **options)
