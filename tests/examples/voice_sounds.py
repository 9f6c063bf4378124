"""What the models of examples/voices are given in tests: the same numbers on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

SPEAKER = ((1, 1), (2, 160), (3, 37))
"""Numbers of voices and of frames."""

NOTES = (82.41, 220.0, 440.0, 987.77)
"""Of a guitar's lowest string to a soprano, in hertz."""


def mels(voices: int, frames: int) -> Tensor:
    """Something like mel spectrograms [voices, frames, 40]: powers, most of them small."""
    drawn = torch.rand(voices, frames, 40, generator=torch.Generator().manual_seed(voices * 1000 + frames))
    return drawn.pow(6)


def frames(note: float) -> Tensor:
    """Three frames [3, 1024] of a note with overtones, at 16 kHz."""
    time = torch.arange(3 * 1024, dtype=torch.float64) / 16_000
    wave = sum(torch.sin(2 * torch.pi * note * overtone * time) / overtone for overtone in range(1, 6))
    return torch.as_tensor(wave).view(3, 1024).float()
