"""Reads a recording, so that the detector can listen to it."""

import math
import wave
from pathlib import Path

import torch
from torch import Tensor

RATE = 16_000


def read(path: Path) -> Tensor:
    """Returns the samples of a WAV file of 16 bits and 48 kHz: its first channel at 16 kHz, from -1 to 1.

    Raises:
        ValueError: The file has another rate or other samples.
    """
    with wave.open(str(path)) as file:
        channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
        if (width, rate) != (2, 3 * RATE):
            raise ValueError(f"{path} has {8 * width} bits at {rate} Hz; it must have 16 at {3 * RATE}")
        data = bytearray(file.readframes(file.getnframes()))
    samples = torch.frombuffer(data, dtype=torch.int16).view(-1, channels)[:, 0] / 32768
    return _a_third(samples)


def _a_third(samples: Tensor, taps: int = 97) -> Tensor:
    """Every third sample, of what is below 8 kHz: a sinc in a Hann window."""
    at = torch.arange(taps, dtype=torch.float64) - taps // 2
    kernel = torch.special.sinc(at / 3) / 3 * torch.cos(math.pi * at / taps).square()
    padded = torch.nn.functional.pad(samples.double(), (taps // 2, taps // 2))
    return torch.nn.functional.conv1d(padded.view(1, 1, -1), kernel.view(1, 1, -1), stride=3).float().flatten()


def chunks(samples: Tensor, count: int, size: int) -> Tensor:
    """Returns `count` chunks [count, size] of the recording, which starts again at its end."""
    repeated = samples.repeat(-(-count * size // len(samples)))
    return repeated[: count * size].view(count, size)
