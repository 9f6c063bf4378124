"""Reads recordings at the detector's sample rate."""

import math
import wave
from pathlib import Path

import torch
from torch import Tensor

RATE = 16_000

# Of the kernel that resamples: a sinc in a Hann window.
_CUTOFF = 0.95  # of 8 kHz, where it lets half of the amplitude pass
_REACH = 24  # samples at 16 kHz, to each side
_BLOCK = 1 << 14  # samples that are computed together


def read(path: Path) -> Tensor:
    """Returns the samples of a WAV file at 16 kHz, from -1 to 1: the mean of its channels.

    Raises:
        ValueError: It is no WAV file, has a rate below 16 kHz, or its samples are not integers of 16 bits.
        OSError: It cannot be read.
    """
    try:
        with wave.open(str(path)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = bytearray(file.readframes(file.getnframes()))
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path} is no WAV file of plain samples: {error or 'it is too short'}") from error
    if width != 2 or rate < RATE:
        raise ValueError(f"{path} has {8 * width} bits at {rate} Hz; it must have 16 bits at {RATE} Hz or more")
    frames = torch.frombuffer(data, dtype=torch.int16) if data else torch.empty(0, dtype=torch.int16)
    return resampled(frames.view(-1, channels).double().mean(1) / 32768, rate).float()


def resampled(samples: Tensor, rate: int) -> Tensor:
    """Returns samples at 16 kHz, in float64, without what is above 8 kHz.

    Args:
        samples: [count], at `rate`. Before and after them is silence.
        rate: In Hz, 16 kHz or more.
    """
    samples = samples.double()
    if rate == RATE:
        return samples
    step = rate / RATE
    reach = math.ceil(_REACH * step)
    padded = torch.nn.functional.pad(samples, (reach, reach + 1))
    taps = torch.arange(-reach, reach + 1)
    found = [samples.new_empty(0)]
    for block in torch.arange(math.ceil(len(samples) / step), dtype=torch.float64).split(_BLOCK):
        at = block * rate / RATE
        near = at.long().unsqueeze(1) + taps
        found.append((padded[near + reach] * _kernel((near - at.unsqueeze(1)) / step)).sum(1) / step)
    return torch.cat(found)


def _kernel(distance: Tensor) -> Tensor:
    """The weight of a sample at a distance in samples at 16 kHz."""
    window = torch.cos(math.pi / 2 * distance / _REACH).square() * (distance.abs() < _REACH)
    return _CUTOFF * torch.special.sinc(_CUTOFF * distance) * window


def chunks(samples: Tensor, size: int) -> Tensor:
    """Returns the samples as chunks [count, size]; silence fills the last one."""
    return torch.nn.functional.pad(samples, (0, -len(samples) % size)).view(-1, size)
