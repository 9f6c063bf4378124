"""How far an output may be from eager's where the spec does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from exportkit.errors import UsageError
from exportkit.package.manifest import OutputTolerance
from exportkit.spec import Tolerance

# Compiled code fuses, and so rounds and adds up in another order than eager: torch.testing's defaults, made for one
# operator at a time, are too tight for a whole model (huggingface/optimum#449, #978). Everything that is not floating
# is exact.
DEFAULTS: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    # One step of these: 3 and 2 bits of mantissa, and the smallest number.
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), (2**-3, 2**-9)),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), (2**-2, 2**-16)),
    torch.complex128: (1e-7, 1e-7),
    torch.complex64: (1e-4, 1e-5),
}


def output_tolerances(
    outputs: Sequence[tuple[str, torch.dtype]], given: Mapping[str, Tolerance], *, cast: torch.dtype | None = None
) -> tuple[OutputTolerance, ...]:
    """The tolerance of every output.

    Args:
        outputs: Names and dtypes.
        given: Those of the spec, by name.
        cast: The dtype that the model was cast to, if it was. The spec's tolerances are for the model as it is, and
            are widened to what that dtype can hold.

    Raises:
        UsageError: A tolerance is for, or refers to, an output that the model does not have.
    """
    names = [name for name, _ in outputs]
    for name, tolerance in given.items():
        for mentioned in (name, tolerance.ranking_of, tolerance.rows_of):
            if mentioned is not None and mentioned not in names:
                raise UsageError(
                    f"the tolerance of {name!r} is about an output {mentioned!r}, which the model does not have",
                    hint=f"It has {', '.join(names)}.",
                )
    found = []
    for name, dtype in outputs:
        tolerance = given[name] if name in given else _default(dtype, cast)
        if cast is not None:
            tolerance = _widened(tolerance, dtype, cast)
        found.append(
            OutputTolerance(
                rtol=tolerance.rtol, atol=tolerance.atol, ranking_of=tolerance.ranking_of, rows_of=tolerance.rows_of
            )
        )
    return tuple(found)


def _default(dtype: torch.dtype, cast: torch.dtype | None) -> Tolerance:
    """That of a dtype; of the one that the model computes in, where an output is converted to a wider one."""
    rtol, atol = DEFAULTS.get(dtype, (0.0, 0.0))
    if cast is None or not dtype.is_floating_point:
        return Tolerance(rtol, atol)
    return Tolerance(max(rtol, DEFAULTS[cast][0]), max(atol, DEFAULTS[cast][1]))


def _widened(tolerance: Tolerance, dtype: torch.dtype, cast: torch.dtype) -> Tolerance:
    rtol, atol = DEFAULTS[cast]
    if dtype == cast:
        return replace(tolerance, rtol=max(tolerance.rtol, rtol), atol=max(tolerance.atol, atol))
    if not dtype.is_floating_point and max(tolerance.rtol, tolerance.atol) > 0:
        # Rounded from something floating, which is now as exact as the dtype, and so relative to its own size.
        return replace(tolerance, rtol=max(tolerance.rtol, rtol))
    return tolerance
