"""Listens to a recording with a package of detector.py: `python listen.py speech.pt2 voice.wav`."""

import sys
from pathlib import Path

import recording

import exportkit


def main() -> None:
    """Prints how likely speech is in each 32 ms."""
    samples = recording.read(Path(sys.argv[2]))
    with exportkit.load(sys.argv[1]) as model, model.session(streams=1) as session:
        for number, chunk in enumerate(recording.chunks(samples, len(samples) // 512, 512)):
            likely = float(session(chunk[None])[0])
            print(f"{number * 0.032:5.2f} s  {likely:.2f}  {'#' * round(40 * likely)}")


if __name__ == "__main__":
    main()
