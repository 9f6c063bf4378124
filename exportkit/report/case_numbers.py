"""Summarizes the recorded cases: values, and how far eager is from the reference. NumPy only; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref, c_double
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.dtypes import ITEM_BYTES, SAFETENSORS_DTYPES, values_of
from exportkit.package.manifest import Accuracy, Case, TensorOutput
from exportkit.report.untrusted import LeftOut

if TYPE_CHECKING:
    import numpy as np

LOWEST, HIGHEST, PER_DECADE = -16, 2, 2  # the decades of errors that a histogram has, and its bars in each
_BARS = 24  # of a histogram of values


@dataclass
class _Output:
    described: TensorOutput
    values: list[np.ndarray] = field(default_factory=list)
    errors: list[np.ndarray] = field(default_factory=list)


def case_numbers(reader: PackageReader, left_out: LeftOut) -> list[dict[str, Any]]:
    """Summarizes each output over the recorded cases. What cannot be read or is too much is noted in `left_out`.

    Returns:
        For each output its name, the histogram of its values, and that of eager's errors where it has references.
        An error is defined as in FORMAT.md, "Verdicts".
    """
    outputs = [_Output(output) for output in reader.manifest.call.outputs]
    left = left_out.limits.case_bytes
    for case in left_out.first(reader.manifest.cases, left_out.limits.cases, "cases in the histograms"):
        size = reader.record(case.record).size
        if size > left:
            left_out.note(
                f"{case.record} in the histograms: the cases take more than {left_out.limits.case_bytes >> 20} MiB"
            )
            continue
        left -= size
        try:
            _add(outputs, case, tensors_of(reader.read(case.record)))
        except UnreadableCaseError as error:
            left_out.note(f"{case.record} in the histograms: {error}")
    return [_summary(output, reader.manifest.cases) for output in outputs]


class UnreadableCaseError(Exception):
    """A record of a case is not what the manifest says."""


def tensors_of(content: bytes) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file as arrays; those of dtypes that NumPy lacks are widened to float32.

    Raises:
        UnreadableCaseError: It is not a safetensors file, or it has a dtype that packages do not have.
    """
    from safetensors import SafetensorError, deserialize

    try:
        found = deserialize(content)
    except SafetensorError as error:
        raise UnreadableCaseError(f"it is not a safetensors file: {error}") from error
    tensors = {}
    for name, tensor in found:
        if tensor["dtype"] not in SAFETENSORS_DTYPES:
            raise UnreadableCaseError(f"{name} has dtype {tensor['dtype']}")
        tensors[name] = values_of(SAFETENSORS_DTYPES[tensor["dtype"]], tensor["data"]).reshape(tensor["shape"])
    return tensors


def _add(outputs: Sequence[_Output], case: Case, tensors: Mapping[str, np.ndarray]) -> None:
    names = {output.described.name: index for index, output in enumerate(outputs)}
    for index, output in enumerate(outputs):
        values, reference = tensors.get(f"output.{index}"), tensors.get(f"reference.{index}")
        if values is None:
            raise UnreadableCaseError(f"it has no output.{index}")
        if values.dtype.kind == "c":
            continue
        output.values.append(values.ravel())
        if reference is None or values.dtype.kind != "f" or case.accuracy.get(output.described.name) is None:
            continue
        if reference.shape != values.shape or reference.dtype.kind != "f":
            raise UnreadableCaseError(f"reference.{index} does not fit output.{index}")
        selected = None
        if (rows_of := output.described.tolerance.rows_of) is not None:
            chosen = names.get(rows_of)
            selected = _same_rows(tensors.get(f"output.{chosen}"), tensors.get(f"reference.{chosen}"), values)
        errors = _errors(values, reference)
        output.errors.append(errors.ravel() if selected is None else errors[selected])


def _same_rows(given: np.ndarray | None, known: np.ndarray | None, values: np.ndarray) -> np.ndarray | None:
    """Selects the rows whose index is the same in eager's answer and in the reference; None if that is not known."""
    if given is None or known is None or given.shape != known.shape or values.shape[: given.ndim] != given.shape:
        return None
    selected: np.ndarray = given == known
    return selected


def _errors(values: np.ndarray, reference: np.ndarray) -> np.ndarray:
    import numpy as np

    wide = np.ascontiguousarray(reference, "f8")
    typical = c_double()
    core.call("ek_typical_magnitude", wide.ctypes.data, wide.size, byref(typical))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(values - wide) / np.maximum(np.abs(wide), typical.value)
    errors[~(np.isfinite(values) & np.isfinite(wide))] = np.inf
    errors[(values == wide) | (np.isnan(values) & np.isnan(wide))] = 0
    return errors


def _summary(output: _Output, cases: Sequence[Case]) -> dict[str, Any]:
    described = output.described
    summary: dict[str, Any] = {"name": described.name, "dtype": described.dtype}
    if output.values:
        summary["values"] = _value_histogram(output.values)
    found = [a for case in cases if (a := case.accuracy.get(described.name)) is not None]
    if output.errors and found:
        eager = Accuracy(rms=max(a.rms for a in found), greatest=max(a.greatest for a in found))
        allowed = (c_double * 2)()  # ek_accuracy: rms, greatest
        if described.dtype in ITEM_BYTES:
            given = (c_double * 2)(eager.rms, eager.greatest)
            core.call("ek_allowed_error", byref(given), described.dtype.encode(), byref(allowed))
        summary["errors"] = {
            **_error_histogram(output.errors),
            "rms": eager.rms,
            "greatest": eager.greatest,
            "rms_allowed": allowed[0],
            "greatest_allowed": allowed[1],
        }
    return summary


def _value_histogram(parts: Sequence[np.ndarray]) -> dict[str, Any]:
    import numpy as np

    values = np.concatenate(parts).astype("f8")
    finite = values[np.isfinite(values)]
    summary: dict[str, Any] = {
        "count": values.size,
        "nan": int(np.isnan(values).sum()),
        "infinite": int(np.isinf(values).sum()),
        "zero": int((values == 0).sum()),
    }
    if finite.size:
        low, high = float(finite.min()), float(finite.max())
        summary |= {"low": low, "high": high, "mean": float(finite.mean())}
        if np.isfinite(high - low):
            bars, _ = np.histogram(finite, bins=_BARS, range=(low, high))
            summary["bars"] = bars.tolist()
    return summary


def _error_histogram(parts: Sequence[np.ndarray]) -> dict[str, Any]:
    import numpy as np

    errors = np.concatenate(parts)
    inside = errors[(errors > 0) & np.isfinite(errors)]
    places = np.clip(np.log10(inside), LOWEST, HIGHEST - 1e-9) if inside.size else inside
    bars, _ = np.histogram(places, bins=(HIGHEST - LOWEST) * PER_DECADE, range=(LOWEST, HIGHEST))
    return {
        "count": errors.size,
        "exact": int((errors == 0).sum()),
        "infinite": int(np.isinf(errors).sum()),
        "lowest": LOWEST,
        "per_decade": PER_DECADE,
        "bars": bars.tolist(),
    }
