"""Models of a newcomer, right and wrong ones. The tests copy this file into a folder of their own, as models.py."""

from __future__ import annotations

import torch
from torch import nn

import exportkit


class Lin(nn.Module):
    """A linear layer."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 6)

    def forward(self, x):
        return self.linear(x)


def half():
    """Its weights are in half precision."""
    return Lin().half()


def from_checkpoint(path: str):
    """Reads a checkpoint."""
    model = Lin()
    model.load_state_dict(torch.load(path))
    return model


class Two(nn.Module):
    """Two inputs that share their first size."""

    def forward(self, x, y):
        return x + y


class Nested(nn.Module):
    """Five tensors, in dicts and lists, that share their first size."""

    def forward(self, batch):
        first, second = batch["features"]
        return batch["x"] + first["v"] + second["v"] + batch["mask"] + batch["z"]


def nested():
    """Has no sizes that vary."""
    tensors = {name: torch.rand(4, 8) for name in ("x", "mask", "z")}
    batch = {**tensors, "features": [{"v": torch.rand(4, 8)}, {"v": torch.rand(4, 8)}]}
    return exportkit.ExportSpec(Nested(), example_inputs=(batch,))


class Crossed(nn.Module):
    """The example's batch is as large as a size inside of the model, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y, table):
        return self.linear(x) + y + table.sum(0)


class Tiny(nn.Module):
    """Has positions for 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, 8), nn.Embedding(64, 8)

    def forward(self, input_ids):
        where = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.tokens(input_ids) + self.positions(where)


class Keywords(nn.Module):
    """Takes what it is given."""

    def forward(self, x, **kwargs):
        return x * kwargs.get("scale", 2.0)


class Branches(nn.Module):
    """Branches on a value."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


class Halves(nn.Module):
    """Takes even sizes only."""

    def forward(self, x):
        return x.reshape(x.shape[0] // 2, 2, 8).sum(1)


def wrong_key():
    """A size of an input that there is not."""
    return exportkit.ExportSpec(Lin(), (torch.rand(4, 8),), dynamic_shapes={"y": {0: "batch[1:64]"}})


def wrong_part():
    """A size of a part that there is not."""
    shapes = {"batch": {"x": {0: "n[1:32]"}, "masks": {0: "n"}}}
    return exportkit.ExportSpec(Nested(), nested().example_inputs, dynamic_shapes=shapes)


def text_as_inputs():
    """The inputs are no tuple."""
    return exportkit.ExportSpec(Lin(), torch.rand(4, 8))


class Mode(nn.Module):
    """Takes a string."""

    def forward(self, x, mode: str):
        return x * 2 if mode == "a" else x * 3


class Squeezed(nn.Module):
    """Drops the batch, too, where it is 1."""

    def forward(self, x):
        return x[:, :1].squeeze()


net = Lin()
mode = exportkit.ExportSpec(Mode(), example_kwargs={"mode": "a"})
number = 3


class Labels(nn.Module):
    """The best class of every pixel: a dimension of classes that is not the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 5, 1)

    def forward(self, x):
        y = self.layer(x)
        return {"logits": y, "labels": y.argmax(1)}


def labels():
    """Says that the labels rank the logits."""
    ranked = {"labels": exportkit.Tolerance(ranking_of="logits")}
    return exportkit.ExportSpec(Labels(), (torch.rand(2, 1, 6, 7),), tolerances=ranked)


def labels_of_dim():
    """The advice, followed."""
    ranked = {"labels": exportkit.Tolerance(ranking_of="logits", dim=1)}
    return exportkit.ExportSpec(Labels(), (torch.rand(2, 1, 6, 7),), tolerances=ranked)


class Scaled(nn.Module):
    """Only its first input must be given."""

    def forward(self, x, scale=2.0, names=None):
        return x * scale
