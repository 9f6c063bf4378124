"""Chooses how far an output may differ from the eager model's where the spec does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from exportkit.errors import UsageError
from exportkit.package.manifest import ANY_VALUE, OutputTolerance, TensorOutput
from exportkit.spec import Tolerance

# Compiled code fuses operators, so it rounds and sums in another order than eager mode. The defaults of torch.testing
# are for single operators and too tight for a whole model (huggingface/optimum#449, #978). Integers and booleans must
# be equal.
DEFAULTS: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    # One step of a mantissa of 3 or 2 bits, and the smallest number.
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), (2**-3, 2**-9)),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), (2**-2, 2**-16)),
    torch.complex128: (1e-7, 1e-7),
    torch.complex64: (1e-4, 1e-5),
}


def output_tolerances(
    outputs: Sequence[tuple[str, torch.dtype]], given: Mapping[str, Tolerance], *, cast: torch.dtype | None = None
) -> tuple[OutputTolerance, ...]:
    """Returns the tolerance of each output.

    Args:
        outputs: Names and dtypes.
        given: The spec's tolerances, by name of the output.
        cast: The dtype that the model was cast to, if it was. The spec's tolerances are for the model before the cast,
            and are widened to the precision of that dtype.

    Raises:
        UsageError: A tolerance names an output that the model does not have.
    """
    names = [name for name, _ in outputs]
    for name, tolerance in given.items():
        for mentioned in (name, tolerance.ranking_of, tolerance.rows_of):
            if mentioned is not None and mentioned not in names:
                raise UsageError(
                    f"the tolerance of {name!r} names the output {mentioned!r}, which the model does not have",
                    hint=f"It has {', '.join(names)}.",
                )
    found = []
    for name, dtype in outputs:
        tolerance = given.get(name, Tolerance())
        rtol, atol = _numbers(tolerance, dtype, cast)
        found.append(OutputTolerance(rtol=rtol, atol=atol, ranking_of=tolerance.ranking_of, rows_of=tolerance.rows_of))
    return tuple(found)


def accuracy_outputs(outputs: Sequence[TensorOutput], given: Mapping[str, Tolerance]) -> tuple[str, ...]:
    """Returns the floating outputs that are held to eager's accuracy: those for which the spec gives no numbers."""
    return tuple(
        output.name
        for output in outputs
        if getattr(torch, output.dtype).is_floating_point
        and given.get(output.name, Tolerance()).rtol is None
        and output.tolerance.atol != ANY_VALUE
    )


def _numbers(tolerance: Tolerance, dtype: torch.dtype, cast: torch.dtype | None) -> tuple[float, float]:
    """Returns rtol and atol: the given ones, widened to the precision of a cast, or the default of the dtype.

    The default is that of the dtype that the model computes in if that is less precise.
    """
    if tolerance.rtol is None or tolerance.atol is None:
        rtol, atol = DEFAULTS.get(dtype, (0.0, 0.0))
        widen = dtype.is_floating_point
    else:
        rtol, atol = tolerance.rtol, tolerance.atol
        widen = dtype == cast
    if cast is None:
        return rtol, atol
    if widen:
        return max(rtol, DEFAULTS[cast][0]), max(atol, DEFAULTS[cast][1])
    if not dtype.is_floating_point and max(rtol, atol) > 0:
        # The output was rounded from a floating value, whose error grows with its size.
        return max(rtol, DEFAULTS[cast][0]), atol
    return rtol, atol
