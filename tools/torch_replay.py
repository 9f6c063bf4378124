"""Replays the recorded calls of packages, and prints a digest of the answers of each.

`python -m tools.torch_replay PACKAGE ...`: `tools.torch_matrix` runs it with the Python of each torch. What it prints
last is JSON: what ran the code, and for each package the number of answers and the digest of their bits, or the error.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator

import torch

import exportkit
from exportkit.errors import ExportkitError
from exportkit.package.structure import flatten
from exportkit.runtime.runner import runner_class


def answers(model: exportkit.Model) -> Iterator[list[torch.Tensor]]:
    """Yields the tensors that each recorded call answers; after a session's calls, its state."""
    for case in model.cases:
        session = model.session(**case.state_sizes) if model.manifest.state else None
        for call in case.calls:
            method = (session or model).methods[call.method]
            with torch.no_grad():
                answer = method(*call.args, **call.kwargs)
            yield flatten(answer, torch.is_tensor)[1]
        if session is not None:
            yield list(session.state.values())
            session.close()


def replay(package: str) -> dict[str, object]:
    """Returns how many answers a package gave, and the digest of their dtypes, sizes and bits."""
    digest, count = hashlib.sha256(), 0
    with exportkit.load(package, device="cpu") as model:
        for tensors in answers(model):
            count += 1
            for tensor in tensors:
                digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {"answers": count, "bits": digest.hexdigest()}


def main() -> None:
    """Replays the packages that the command line names."""
    found: dict[str, object] = {}
    for package in sys.argv[1:]:
        try:
            found[package] = replay(package)
        except ExportkitError as error:
            found[package] = {"error": f"{type(error).__name__}: {error.message}"}
    print(json.dumps({"runtime": runner_class().__name__, "packages": found}))


if __name__ == "__main__":
    main()
