"""Describes a manifest in words, for `inspect` and `export`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from exportkit.package.case_files import recorded_errors, results_of
from exportkit.package.manifest import (
    ANY_VALUE,
    Call,
    Case,
    ConstantNode,
    Library,
    Manifest,
    Onnx,
    Operator,
    Target,
    TensorNode,
)
from exportkit.sizes import bytes_text, shape_text


def input_rows(call: Call) -> Iterator[tuple[str, ...]]:
    """Yields the name, and the dtype and shape, of every input tensor; then the constants that export fixed."""
    for tensor in call.inputs:
        yield tensor.name, f"{tensor.dtype}{shape_text(tensor.shape)}"
    for parameter in call.parameters:
        if isinstance(parameter.value, ConstantNode):
            yield parameter.name, f"fixed at {parameter.value.value!r}"


def output_rows(call: Call, cases: Sequence[Case] = (), method: str = "forward") -> Iterator[tuple[str, ...]]:
    """Yields the name, the dtype and shape, and the allowed difference of every output tensor."""
    errors = recorded_errors(cases, method)
    for output in results_of(call):
        tolerance = output.tolerance
        if tolerance.ranking_of is not None:
            text = f"ranks `{tolerance.ranking_of}`"
        elif tolerance.atol == ANY_VALUE:
            text = "any values"
        elif output.name in errors:
            text = "as accurate as eager"
        elif tolerance.rtol == tolerance.atol == 0:
            text = "exact"
        else:
            text = f"rtol {tolerance.rtol:g}, atol {tolerance.atol:g}"
        if tolerance.rows_of is not None:
            text += f", rows of `{tolerance.rows_of}`"
        name = "(the result)" if isinstance(call.result, TensorNode) else output.name
        yield name, f"{output.dtype}{shape_text(output.shape)}", text


def dimension_text(call: Call) -> str:
    """Returns such as `batch 1..64, gh 8..96`; empty if every size is fixed."""
    return ", ".join(f"{dimension.name} {dimension.min}..{dimension.max}" for dimension in call.dimensions)


def target_text(target: Target) -> str:
    """Says what a target needs, and which torch built it."""
    if target.device == "cpu":
        device = f"CPU {target.cpu_isa}" if target.cpu_isa else "CPU"
    else:
        device = f"CUDA {target.cuda_architecture}" + (" and newer, by PTX" if target.cuda_ptx else "")
    built = f"built with {target.built_with_torch}"
    return f"{device}, {target.platform}, torch {target.needs_torch} or newer ({built})"


def library_text(library: Library) -> str:
    """Says what a library contains, and what it needs."""
    count = len(library.defines)
    what = f"{count} operators" if count != 1 else "1 operator"
    if not count:
        what = "kernels of operators defined elsewhere" if library.kernels else "needed by other libraries"
    if library.torch_bound is not None:
        needs = f"torch {library.torch_bound} only: it uses more than the stable ABI"
    else:
        needs = f"torch {library.needs_torch} or newer"
    devices = [device.upper() for device in library.kernels if device != "any"] or [library.device.upper()]
    return ", ".join([" and ".join(devices), library.platform, what, needs, *library.needs])


def onnx_rows(onnx: Onnx) -> Iterator[tuple[str, ...]]:
    """Yields what an ONNX model needs, then the name, the size and the digest of each of its files."""
    yield "opset", str(onnx.opset)
    yield "model", bytes_text(onnx.size), onnx.sha256
    if onnx.data is not None:
        yield "weights", bytes_text(onnx.data.size), onnx.data.sha256, onnx.data.name


def functions_text(onnx: Onnx, operator: Operator) -> str:
    """Names the ONNX functions that compute an operator."""
    names = [
        f"{function.domain}::{function.name}" + (f":{function.overload}" if function.overload else "")
        for function in onnx.functions
        if function.operator == operator.name
    ]
    return f"function {', '.join(names)}" if names else "inlined"


def providers(manifest: Manifest) -> dict[str, Library | None]:
    """Maps each operator of the graph to the library that defines it; None if the artifact has no such library."""
    defined = {operator.name: library for library in manifest.libraries for operator in library.defines}
    return {operator.name: defined.get(operator.name) for operator in manifest.operators}
