"""The SPECs that tests walk over, so that a new operator is tested by existing, and their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from exportkit.arr_coc.ops import SPECS, OpSpec, Sample
from exportkit.arr_coc.ops.triton import SPECS as TRITON_SPECS
from exportkit.operators.contract.check_compiler import OperatorCall
from exportkit.operators.contract.sample import tensors

WALKED = sorted(SPECS.items()) + [(f"triton_{name}", spec) for name, spec in sorted(TRITON_SPECS.items())]


def pairs(only: Callable[[OpSpec], bool] = lambda spec: True) -> list[Any]:
    """The SPECs as parameters of a test."""
    return [pytest.param(spec, id=name) for name, spec in WALKED if only(spec)]


def samples_of(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> list[Sample]:
    return list(spec.samples(device, dtype))


def fresh(value: Any) -> Any:
    return Sample("", (value,)).copied().args[0]


def is_mutable(spec: OpSpec) -> bool:
    return spec.overload._schema.is_mutable


def outcome(function: Any, sample: Sample) -> list[torch.Tensor]:
    """Everything the call produced: outputs, and its arguments if it writes to one."""
    args, kwargs = fresh((sample.args, dict(sample.kwargs)))
    return tensors(function(*args, **kwargs)) + tensors((args, kwargs))


class Call(OperatorCall):
    """A sample as a module of its tensor arguments; everything else is constant."""

    def __init__(self, spec: OpSpec, sample: Sample) -> None:
        arguments = spec.overload._schema.arguments
        bound = dict(zip([a.name for a in arguments], sample.args)) | dict(sample.kwargs)
        written = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        super().__init__(spec.wrapper, bound, written)
