"""The operators `arr_coc::*`. Importing this package loads their libraries and registers fakes and gradients.

Every module whose name does not start with an underscore is one operator: wrapper, reference, gradient, samples and
SPEC, in this order. The layout in the SPEC gives the fake kernel and the shapes that `help` shows. Modules are found
automatically: `exportkit.arr_coc.ops.compute_entropy` is the wrapper in `compute_entropy.py`.
"""

from __future__ import annotations

import importlib
import pkgutil

from exportkit.arr_coc.ops._autocast import register_autocast
from exportkit.arr_coc.ops._from_layout import add_shapes, register_fake
from exportkit.arr_coc.ops._library import load_libraries
from exportkit.operators.contract.operator_spec import OpSpec, Refusal, Sample

load_libraries()

_modules = [
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_") and not module.ispkg  # `triton` is imported separately
]

SPECS: dict[str, OpSpec] = {
    spec.name: spec for module in _modules for spec in vars(module).values() if isinstance(spec, OpSpec)
}
"""Every operator of the library by name, gradient operators included."""

for _spec in SPECS.values():
    register_fake(_spec)
    add_shapes(_spec)
    register_autocast(_spec)

globals().update({name: spec.wrapper for name, spec in SPECS.items()})

__all__ = ["SPECS", "OpSpec", "Refusal", "Sample", *SPECS]
