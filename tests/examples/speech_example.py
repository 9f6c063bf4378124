"""The modules of examples/speech, which is not installed here, and the recordings that its tests hear."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.examples.example_packages import EXAMPLES
from tests.operators.scaffold.scaffolded import imported

FOLDER = EXAMPLES / "speech"
imported("exportkit_speech", FOLDER / "exportkit_speech" / "__init__.py")

# Below, since the lines above make the example importable.
from exportkit_speech import __main__ as command  # noqa: E402
from exportkit_speech import detector, listen, recording, speech_times  # noqa: E402

__all__ = ["command", "detector", "listen", "recording", "speech_times"]

_SOUNDS = Path("/usr/share/sounds/alsa")  # of Debian's alsa-utils: 48 kHz


def sound(name: str) -> Path:
    """A recording, such as "Front_Center", a woman's voice, or "Noise"."""
    path = _SOUNDS / f"{name}.wav"
    if not path.exists():
        pytest.skip(f"there is no {path}: apt-get install alsa-utils")
    return path


def voices() -> list[Path]:
    """All recordings of the voice."""
    sound("Front_Center")
    return sorted(path for path in _SOUNDS.glob("*.wav") if path.stem != "Noise")


def repeated(samples: Tensor, count: int) -> Tensor:
    """So many chunks [count, 512] of a recording, which starts again at its end."""
    size = detector.SAMPLES
    return samples.repeat(-(-count * size // len(samples)))[: count * size].view(count, size)


def eager(chunks: Tensor) -> list[float]:
    """What the module itself answers, in the dtype of the chunks."""
    model = detector.trained().to(chunks.dtype)
    with torch.no_grad():
        return [model(chunk[None]).item() for chunk in chunks]
