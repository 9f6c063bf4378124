"""Mixed precision: the dtype an operator computes in under `torch.autocast`.

The kernels take one dtype. In an autocast region, a linear layer's result has half precision, but parameters and image
data are float32. `torch.library.register_autocast` would cast everything to one fixed dtype; these rules depend on the
given dtypes. The casts are traced, so a compiled or exported program contains them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from exportkit.operators.contract.operator_spec import Autocast, OpSpec

_LIBRARIES: dict[str, torch.library.Library] = {}  # by namespace; the rules exist as long as these objects
_KEYS = [torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA]
_KEY_SET = torch._C.DispatchKeySet(_KEYS[0]) | torch._C.DispatchKeySet(_KEYS[1])


def register_autocast(spec: OpSpec) -> None:
    """Registers the rule `spec.autocast` on CPU and CUDA."""
    if spec.autocast is None:
        return
    overload, rule = spec.overload, spec.autocast
    if spec.namespace not in _LIBRARIES:
        _LIBRARIES[spec.namespace] = torch.library.Library(spec.namespace, "FRAGMENT")

    def call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if dtypes := [
            a.dtype for a in (*args, *kwargs.values()) if _is_floating(a)
        ]:  # without any, the operator refuses the call
            dtype = autocast_dtype(rule, dtypes)
            args = tuple(_cast(a, dtype) for a in args)
            kwargs = {name: _cast(a, dtype) for name, a in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(_KEY_SET):
            return overload(*args, **kwargs)

    for key in _KEYS:
        _LIBRARIES[spec.namespace].impl(spec.name, call, key.name, with_keyset=True)


def autocast_dtype(rule: Autocast, dtypes: list[torch.dtype]) -> torch.dtype:
    """Returns the dtype that floating arguments of these dtypes are cast to. The order is the schema's."""
    if rule == "first":
        return dtypes[0]
    return functools.reduce(torch.promote_types, dtypes, torch.float32 if rule == "float32" else dtypes[0])


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _is_floating(value) else value
