"""Gives every input of the galleries' packages values that no model expects: `python -m tools.hostile_values`.

    python -m tools.hostile_values [--device cuda] [--jobs N] [--graphs] [NAME ...]

Each module of tests/gallery that exports is compiled, and called in a process of its own: integers beyond both ends of
an index and the ends of the dtype, NaN and infinities, at one place and at every place. A value may be answered or
refused. The process must live, and answer the next call as before. Prints a line for each module, and exits with 1 if
one does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import exportkit
from exportkit.errors import InputError, ModelRunError
from exportkit.installed import register_operators
from exportkit.package.archive import PackageReader
from tests.gallery.entries import LIBRARY, ROOT, Entry, entries, operator_library

FAR = 1_000_000_007
SLOW = 120  # seconds


def hostile(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensor with each hostile value at its first element, and at every element."""
    values: list[Any]
    if tensor.dtype is torch.bool or not tensor.numel():
        return
    if tensor.is_floating_point() or tensor.is_complex():
        values = [float("nan"), float("inf"), float("-inf"), 1e30]
    else:
        limits = torch.iinfo(tensor.dtype)
        values = [v for v in (-1, 0, FAR, -FAR, limits.max, limits.min) if limits.min <= v <= limits.max]
    for value, every in itertools.product(values, (False, True)):
        changed = tensor.clone().contiguous()
        (changed if every else changed.view(-1)[:1]).fill_(value)
        yield changed


def attack(package: Path, *, device: str, graphs: bool) -> str:
    """Calls a package with hostile values. Returns how many were answered and refused.

    Raises:
        AssertionError: The call after one of them is not as before.
    """
    answered = refused = 0
    with PackageReader(package) as reader:
        register_operators(operator.name for operator in reader.manifest.operators)
    with exportkit.load(package, device=device, cuda_graphs=graphs) as model:
        recorded = next(
            (case.calls[0] for case in model.cases if not model.methods[case.calls[0].method].stateful), None
        )
        if recorded is None:
            return "every method has state"

        def call(leaves: list[Any]) -> list[torch.Tensor]:
            args, kwargs = tree_unflatten([_copy(leaf) for leaf in leaves], structure)
            result = model.methods[recorded.method](*args, **kwargs)
            model.synchronize()
            return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]

        usual, structure = tree_flatten((recorded.args, recorded.kwargs))
        expected = call(usual)
        for place, leaf in enumerate(usual):
            for changed in hostile(leaf) if isinstance(leaf, torch.Tensor) else ():
                try:
                    call([*usual[:place], changed, *usual[place + 1 :]])
                    answered += 1
                except (ModelRunError, InputError):
                    refused += 1
                for one, other in zip(call(usual), expected, strict=True):
                    torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-3, atol=1e-3)
    return f"{answered} answered, {refused} refused"


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _tried(entry: Entry, folder: Path, options: argparse.Namespace) -> tuple[Entry, bool, str]:
    package = folder / f"{entry.name}.pt2"
    own = [str(operator_library())] if LIBRARY in entry.arguments else []
    words = [own[0] if word == LIBRARY else word for word in entry.arguments]
    export = [*words, "-o", str(package), "--device", options.device, "--cases", "1", "--no-edge-cases"]
    environment = {**os.environ, "EXPORTKIT_CACHE": str(folder / "cache")}
    for name, command in (
        ("export", ["-m", "exportkit", "export", *export]),
        ("calls", ["-m", "tools.hostile_values", "--attack", str(package), "--device", options.device, *own]),
    ):
        more = ["--graphs"] if options.graphs and name == "calls" else []
        try:
            done = subprocess.run(
                [sys.executable, *command, *more],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SLOW,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return entry, True, f"no {name} in {SLOW} s"  # a loop runs as often as a value says, in eager, too
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
            return entry, name == "export", f"{name} ended with {done.returncode}: {said[-1][:200]}"
    return entry, True, done.stdout.strip()


def main() -> int:
    """Tries the modules, or attacks one package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--attack", type=Path)
    options = parser.parse_args()
    if options.attack:
        for operators in options.names:
            torch.ops.load_library(operators)
        print(attack(options.attack, device=options.device, graphs=options.graphs))
        return 0
    chosen = [e for e in entries() if not e.exit_code and (not options.names or e.name in options.names)]
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(_tried, each, Path(folder), options) for each in chosen]):
            entry, holds, said = done.result()
            failed += not holds
            print(f"{'ok  ' if holds else 'FAIL'} {entry.theme}.{entry.name}: {said}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} modules hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
