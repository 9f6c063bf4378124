"""CPU seconds of `exportkit export`, with the sources of several folders in turns: what a change costs or gains.

    git worktree add /tmp/without && ...                                   # the same sources without something
    python -m benchmarks.export_time . /tmp/without                        # a first export
    python -m benchmarks.export_time . /tmp/without --again --model llama  # one that was made before

Seconds of the whole tree of processes, compilers included, so that a busy machine counts little. Caches are empty, or,
with `--again`, filled by an export that is not counted. A, B, B, A, ...: the median of each folder, the least and the
greatest, and the median of its quotients with the first folder in the same turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = ("arr-coc", "resnet", "llama")
MADE = Path(__file__).resolve().parent / "models" / "exported.py"


def export(model: str, sources: Path, folder: Path) -> float:
    """Exports in a process with these sources and the caches of a folder. Returns its CPU seconds."""
    name = model if model == "arr-coc" else f"{MADE}:{model}"
    caches = {"EXPORTKIT_CACHE": "packages", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CCACHE_DIR": "ccache"}
    environment = {variable: str(folder / cache) for variable, cache in caches.items()}
    command = [sys.executable, "-m", "exportkit", "export", name, "-o", str(folder / "model.pt2")]
    process = subprocess.Popen(
        command,
        cwd=sources,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
        env={**os.environ, **environment, "PYTHONPATH": str(sources)},
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit((folder / "log").read_text())
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="folders with an `exportkit` that is built")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("--again", action="store_true", help="count exports that were made before")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sources = [folder.resolve() for folder in options.sources]
    for model in options.model or MODELS:
        seconds: dict[Path, list[float]] = {folder: [] for folder in sources}
        with tempfile.TemporaryDirectory(prefix="exportkit-time-") as caches:
            for turn in range(-1 if options.again else 0, options.rounds):
                for folder in sources[:: -1 if turn % 2 else 1]:
                    place = Path(caches, folder.name if options.again else f"{folder.name}-{turn}")
                    place.mkdir(exist_ok=True)
                    seconds[folder].append(export(model, folder, place))
        rounds = {folder: found[-options.rounds :] for folder, found in seconds.items()}  # without what filled caches
        for folder, found in rounds.items():
            quotient = statistics.median(b / a for a, b in zip(rounds[sources[0]], found, strict=True))
            spread = f"{min(found):.1f} to {max(found):.1f}"
            print(f"{model} {folder.name}: {statistics.median(found):.1f} s, {spread}; {quotient:.3f}", flush=True)


if __name__ == "__main__":
    main()
