"""The first token of a new process: exportkit.load and a call, beside torch's own package and loader.

    python -m benchmarks.state --folder build/state --make stateful
    python -m benchmarks.first_token --folder build/state            # on a GPU; --small as for benchmarks.state

Both packages have the same llama with the same weights; torch's is its prefill of 64 tokens. It is made once, which
takes minutes. Each load is in a process of its own that has imported torch and started CUDA, with files in the page
cache. Prints seconds and the token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.children import ROOT, SEARCH_PATH
from benchmarks.state import model

STARTED = """
import json, sys, time
import torch
path, device = sys.argv[1:]
tokens = torch.zeros(1, 64, dtype=torch.int64, device=device)
def wait():
    if device == "cuda":
        torch.cuda.synchronize()
wait()
start = time.perf_counter()
"""
OURS = """
import exportkit
prefill = exportkit.load(path, device).session().prefill
"""
TORCH = """
from torch._inductor import aoti_load_package
prefill = aoti_load_package(path)
"""
CALL = """
wait()
loaded = time.perf_counter()
token = int(prefill(tokens).argmax())
end = time.perf_counter()
print(json.dumps({"load": loaded - start, "token after": end - loaded, "both": end - start, "token": token}))
"""


class Prefill(torch.nn.Module):
    """The method as a module, which torch's packages need."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        self.model = model(small)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.prefill(tokens)


def make(out: Path, small: bool) -> None:
    """Makes torch's package."""
    module = Prefill(small)
    tokens = torch.zeros(1, 64, dtype=torch.int64, device=module.model.position.device)
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(torch.export.export(module, (tokens,)), package_path=str(out))


def run(code: str, package: Path, device: str) -> dict[str, float]:
    command = [sys.executable, "-c", STARTED + code + CALL, str(package.resolve()), device]
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of stateful.pt2")
    parser.add_argument("--small", action="store_true", help="a few thousand parameters, on the CPU")
    parser.add_argument("--repeat", type=int, default=3, help="processes of each")
    options = parser.parse_args()
    stock, device = options.folder / "torch.pt2", "cpu" if options.small else "cuda"
    if not stock.exists():
        make(stock, options.small)
    for _ in range(options.repeat):
        print("exportkit", json.dumps(run(OURS, options.folder / "stateful.pt2", device)), flush=True)
        print("torch", json.dumps(run(TORCH, stock, device)), flush=True)


if __name__ == "__main__":
    main()
