"""Summarizes the recorded cases: values, and how far eager is from the reference. NumPy only; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref, c_double
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.case_files import (
    recorded_errors,
    recorded_state_errors,
    result_keys,
    results_of,
    state_keys,
    state_results,
)
from exportkit.package.dtypes import ITEM_BYTES, SAFETENSORS_DTYPES, values_of
from exportkit.package.manifest import Accuracy, TensorOutput
from exportkit.report.untrusted import LeftOut

if TYPE_CHECKING:
    import numpy as np

LOWEST, HIGHEST, PER_DECADE = -16, 2, 2  # the decades of errors that a histogram has, and its bars in each
_BARS = 24  # of a histogram of values


@dataclass
class _Output:
    described: TensorOutput
    method: str | None  # None: of the state
    accuracy: list[Accuracy]
    values: list[np.ndarray] = field(default_factory=list)
    errors: list[np.ndarray] = field(default_factory=list)


_Outputs = dict[str, _Output]  # by name


def case_numbers(reader: PackageReader, left_out: LeftOut) -> list[dict[str, Any]]:
    """Summarizes each result over the recorded calls, and the state over the ends of the recorded sequences.

    What cannot be read or is too much is noted in `left_out`.

    Returns:
        For each result its name, its method (None for state), the histogram of its values, and that of eager's errors
        where it has references. An error is defined as in FORMAT.md, "Verdicts".
    """
    manifest = reader.manifest
    methods = {
        each.name: _outputs(results_of(each.call), each.name, recorded_errors(manifest.cases, each.name))
        for each in manifest.methods
    }
    state = _outputs(state_results(manifest.state), None, recorded_state_errors(manifest.cases))
    left = left_out.limits.case_bytes
    for case in left_out.first(manifest.cases, left_out.limits.cases, "cases in the histograms"):
        size = reader.record(case.record).size
        if size > left:
            left_out.note(
                f"{case.record} in the histograms: the cases take more than {left_out.limits.case_bytes >> 20} MiB"
            )
            continue
        left -= size
        try:
            tensors = tensors_of(reader.read(case.record))
            for number, call in enumerate(case.calls):
                described = manifest.method(call.method).call
                keys = [result_keys(number, described, reference=known) for known in (False, True)]
                _add(methods[call.method], call.accuracy, *(_by_name(each, tensors) for each in keys))
            keys = [state_keys(manifest.state, reference=known) for known in (False, True)]
            if any(key in tensors for key in keys[0].values()):
                _add(state, case.state_accuracy, *(_by_name(each, tensors) for each in keys))
        except UnreadableCaseError as error:
            left_out.note(f"{case.record} in the histograms: {error}")
    return [_summary(output) for outputs in (*methods.values(), state) for output in outputs.values()]


def _outputs(results: Sequence[TensorOutput], method: str | None, errors: Mapping[str, Sequence[Accuracy]]) -> _Outputs:
    return {each.name: _Output(each, method, list(errors.get(each.name, ()))) for each in results}


def _by_name(keys: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensors[key] for name, key in keys.items() if key in tensors}


class UnreadableCaseError(Exception):
    """A record of a case is not what the manifest says."""


def tensors_of(content: bytes) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file as arrays; those of dtypes that NumPy lacks are upcast to float32.

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


def _add(
    outputs: _Outputs,
    accuracy: Mapping[str, Accuracy | None],
    found: Mapping[str, np.ndarray],
    references: Mapping[str, np.ndarray],
) -> None:
    for name, output in outputs.items():
        values, reference = found.get(name), references.get(name)
        if values is None:
            raise UnreadableCaseError(f"it has no value of {name}")
        if values.dtype.kind == "c":
            continue
        output.values.append(values.ravel())
        if reference is None or values.dtype.kind != "f" or accuracy.get(name) is None:
            continue
        if reference.shape != values.shape or reference.dtype.kind != "f":
            raise UnreadableCaseError(f"the reference of {name} does not fit its value")
        selected = None
        if (rows_of := output.described.tolerance.rows_of) is not None:
            selected = _same_rows(found.get(rows_of), references.get(rows_of), values)
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


def _summary(output: _Output) -> dict[str, Any]:
    described, found = output.described, output.accuracy
    summary: dict[str, Any] = {"name": described.name, "method": output.method, "dtype": described.dtype}
    if output.values:
        summary["values"] = _value_histogram(output.values)
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
