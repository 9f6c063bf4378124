"""Chooses how far an output may differ from the eager model's where the spec does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec import UNSET, UnsetType

from exportkit.errors import UsageError
from exportkit.package.manifest import ANY_VALUE, GradientOf, OutputTolerance, Size, TensorInput, TensorOutput
from exportkit.sizes import shape_text
from exportkit.spec import Tolerance

_Shape = Sequence[int | Size | None]

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

    The spec's tolerances are for the model before a cast, and are upcast to the precision of that dtype.

    Raises:
        UsageError: A tolerance names an output that the model does not have.
    """
    names = [name for name, _ in outputs]
    for name, tolerance in given.items():
        differentiated = tolerance.gradient_of[0] if tolerance.gradient_of else None
        for mentioned in (name, tolerance.ranking_of, tolerance.rows_of, differentiated):
            if mentioned is not None and mentioned not in names:
                raise UsageError(
                    f"the tolerance of {name!r} names the output {mentioned!r}, which the model does not have",
                    hint=f"It has {', '.join(names)}.",
                )
    found = []
    for name, dtype in outputs:
        tolerance = given.get(name, Tolerance())
        rtol, atol = _numbers(tolerance, dtype, cast)
        found.append(
            OutputTolerance(
                rtol=rtol,
                atol=atol,
                ranking_of=tolerance.ranking_of,
                dim=UNSET if tolerance.ranking_of is None or tolerance.dim == -1 else tolerance.dim,
                rows_of=tolerance.rows_of,
                gradient_of=GradientOf(output=of[0], input=of[1], scale=float(tolerance.scale))
                if (of := tolerance.gradient_of)
                else UNSET,
            )
        )
    return tuple(found)


def check_gradients(inputs: Sequence[TensorInput], outputs: Sequence[TensorOutput], *, repeats: bool) -> None:
    """Checks that what is declared to be a gradient can be one.

    `repeats`: the answer depends on the inputs alone.

    Raises:
        UsageError: It names no input, has another shape than that input, or one of the three is not floating.
    """
    described: list[TensorInput | TensorOutput] = [*inputs, *outputs]
    floating = {each.name for each in described if getattr(torch, each.dtype).is_floating_point}
    by_name = {each.name: each for each in inputs}
    for output in outputs:
        of = output.tolerance.gradient_of
        if isinstance(of, UnsetType):
            continue
        what = f"the tolerance of {output.name!r} says gradient_of=({of.output!r}, {of.input!r})"
        if not repeats:
            raise UsageError(f"{what}, and the method has state", hint="Declare it for a method without state.")
        if of.input not in by_name:
            raise UsageError(f"{what}, and there is no such input", hint=f"The inputs are {', '.join(by_name)}.")
        if none := [name for name in (output.name, of.output, of.input) if name not in floating]:
            raise UsageError(f"{what}, and {none[0]} is not floating", hint="Only floating numbers have gradients.")
        if of.output == output.name or output.shape != by_name[of.input].shape:
            raise UsageError(
                f"{what}, and a gradient has the shape of the input that it is with respect to",
                hint=f"They are {shape_text(output.shape)} and {shape_text(by_name[of.input].shape)}.",
            )


def check_rankings(outputs: Sequence[TensorOutput]) -> None:
    """Checks that what is declared to rank another output has indices of one of that output's dimensions.

    Raises:
        UsageError: An output of `ranking_of` has no integers, or another shape than the output that it ranks, but for
            the ranked dimension; or rows are those of indices that do not belong to them.
    """
    by_name = {each.name: each for each in outputs}
    for output in outputs:
        if output.tolerance.ranking_of is None:
            continue
        ranked = by_name[output.tolerance.ranking_of]
        places, values = (f"{each.name} is {each.dtype}{shape_text(each.shape)}" for each in (output, ranked))
        what = f"the tolerance of {output.name!r} says ranking_of={ranked.name!r}: {places}, {values}"
        exact = f"Or leave out the tolerance of {output.name!r}, which must then equal eager's."
        if output.dtype not in ("int64", "int32"):
            raise UsageError(f"{what}, and indices are int64 or int32", hint=exact.removeprefix("Or ").capitalize())
        fitting = [dim for dim in range(len(ranked.shape)) if _are_indices_of(output.shape, ranked.shape, dim)]
        dim = -1 if isinstance(output.tolerance.dim, UnsetType) else output.tolerance.dim
        if dim not in [*fitting, *(each - len(ranked.shape) for each in fitting)]:
            dims = " or ".join(f"dim={each}" for each in fitting)
            raise UsageError(
                f"{what}, dim={dim!r}, and indices have the sizes of the values but for the dimension that they rank",
                hint=f"Say {dims}. {exact}" if fitting else exact.removeprefix("Or ").capitalize(),
            )
    for output in outputs:
        _check_rows(output, by_name)


def _alike(left: _Shape, right: _Shape) -> bool:
    return len(left) == len(right) and all(None in pair or pair[0] == pair[1] for pair in zip(left, right))


def _are_indices_of(indices: _Shape, values: _Shape, dim: int) -> bool:
    """Whether indices may be those of a dimension, which `argmax` leaves out."""
    around = (*indices[:dim], *indices[dim + 1 :]) if len(indices) == len(values) else indices
    return _alike(around, (*values[:dim], *values[dim + 1 :]))


def _check_rows(output: TensorOutput, by_name: Mapping[str, TensorOutput]) -> None:
    if output.tolerance.rows_of is None:
        return
    indices = by_name[output.tolerance.rows_of]
    ranked = by_name.get(indices.tolerance.ranking_of or "", indices)
    last = len(indices.shape) == len(ranked.shape) and indices.tolerance.dim in (UNSET, -1, len(ranked.shape) - 1)
    if not (indices.shape and last and _alike(indices.shape, output.shape[: len(indices.shape)])):
        raise UsageError(
            f"the tolerance of {output.name!r} says rows_of={indices.name!r}: they are {shape_text(output.shape)} and "
            f"{shape_text(indices.shape)}, and rows [..., K, ...] belong to indices [..., K] of a last dimension",
            hint="Such are those of `scores.topk(k)` and of `scores.argmax(-1, keepdim=True)`.",
        )


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
    """Returns rtol and atol: the given ones, upcast to the precision of a cast, or the default of the dtype.

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
