"""The operators `arr_coc_triton::*`: kernels that AOTInductor compiles into the package, so that it needs no library.

`torch.library.triton_op` shows the operator to torch.export and its contents to the compiler. For a CUDA target, the
contents are a Triton kernel, whose machine code is stored in the package. For a CPU target, or without Triton, they are
the same function in ATen. A package that has only these custom operators loads with torch alone.

Every module whose name does not start with an underscore is one operator, as in `exportkit.arr_coc.ops`, which does not
import this package, because that imports Triton if it is installed.
"""

from __future__ import annotations

from exportkit.arr_coc.ops._autocast import register_autocast
from exportkit.arr_coc.ops._operator import add_shapes, specs_in

SPECS = specs_in(__name__, __path__)
"""Every operator of the namespace by name, gradient operators included."""

for _spec in SPECS.values():
    register_autocast(_spec)
    add_shapes(_spec)

globals().update({name: spec.wrapper for name, spec in SPECS.items()})

__all__ = ["SPECS", *SPECS]
