"""Runs every CUDA operator on every sample of its SPEC, for compute-sanitizer; not a test by itself.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python tests/arr_coc/ops/sanitize.py [TEXT IN A NAME ...]

Without caching every tensor is an allocation of its own, so that reading past one is seen.
"""

from __future__ import annotations

import sys

import torch

from exportkit.arr_coc.ops import SPECS
from exportkit.arr_coc.ops.triton import SPECS as TRITON_SPECS


def main(wanted: list[str]) -> None:
    device, calls = torch.device("cuda"), 0
    torch.manual_seed(0)
    specs = {**SPECS, **{f"triton {name}": spec for name, spec in TRITON_SPECS.items()}}
    specs = {name: spec for name, spec in specs.items() if not wanted or any(text in name for text in wanted)}
    for name, spec in sorted(specs.items()):
        for dtype in spec.dtypes:
            for sample in spec.samples(device, dtype):
                spec.wrapper(*sample.args, **sample.kwargs)
                calls += 1
        torch.cuda.synchronize()
        print(f"{name}: ran", flush=True)
    print(f"{calls} calls of {len(specs)} operators on {torch.cuda.get_device_name()}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
