"""The operators `arr_coc::*`. Importing this package loads their libraries and registers fakes and gradients.

Every module whose name does not start with an underscore is one operator: reference, the function that users call,
which is made of it, gradient, samples and SPEC, in this order. The layout in the SPEC gives the fake kernel and the
shapes that `help` shows. `exportkit.arr_coc.ops.compute_entropy` is the function in `compute_entropy.py`.
"""

from __future__ import annotations

import torch

from exportkit.arr_coc import LIBRARIES, LIBRARY_DIR
from exportkit.arr_coc.ops._autocast import register_autocast
from exportkit.arr_coc.ops._operator import OpSpec, Refusal, Sample, add_shapes, register_fake, specs_in
from exportkit.errors import HostError
from exportkit.libraries import load_library


def load_libraries() -> None:
    """Loads libarr_coc_cpu.so, and libarr_coc_cuda.so if torch has CUDA. HostError: they were never built."""
    if "cpu" not in LIBRARIES:
        said = f"the operator library is not built: {LIBRARY_DIR} has no libarr_coc_cpu.so"
        raise HostError(said, hint="Run `pip install --no-build-isolation -e .` (or `make setup`) with a C++ compiler.")
    load_library(LIBRARIES["cpu"], defines=["arr_coc"])
    if "cuda" in LIBRARIES and torch.version.cuda is not None:
        load_library(LIBRARIES["cuda"], defines=())


load_libraries()

SPECS = specs_in(__name__, __path__)
"""Every operator of the library by name, gradient operators included."""

for _spec in SPECS.values():
    register_fake(_spec)
    add_shapes(_spec)
    register_autocast(_spec)

globals().update({name: spec.wrapper for name, spec in SPECS.items()})

__all__ = ["SPECS", "OpSpec", "Refusal", "Sample", *SPECS]
