"""Describes the parts of a manifest as rows of text. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from exportkit.package.archive import PackageReader
from exportkit.package.case_files import recorded_errors, recorded_state_errors, results_of
from exportkit.package.manifest import (
    ANY_VALUE,
    Call,
    Case,
    ConstantNode,
    Library,
    Manifest,
    Onnx,
    Operator,
    PackagedMethod,
    StateTensor,
    Target,
    TensorNode,
    TensorOutput,
)
from exportkit.package.operators_gpus import operators_fits
from exportkit.progress import bytes_text
from exportkit.sizes import shape_text, state_row_bytes

NOT_HERE = "not in this artifact"


def input_rows(call: Call) -> Iterator[tuple[str, ...]]:
    """Yields the name, and the dtype and shape, of every input tensor; then the constants that export fixed."""
    for tensor in call.inputs:
        yield tensor.name, f"{tensor.dtype}{shape_text(tensor.shape)}"
    for parameter in call.parameters:
        if isinstance(parameter.value, ConstantNode):
            yield parameter.name, f"fixed at {parameter.value.value!r}"


def output_rows(method: PackagedMethod, cases: Sequence[Case] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the name, the dtype and shape, and the allowed difference of every result of a method.

    What it writes into an input is a result as well.
    """
    errors, call = recorded_errors(cases, method.name), method.call
    for output in results_of(call):
        name = "(the result)" if isinstance(call.result, TensorNode) and output in call.outputs else output.name
        yield name, f"{output.dtype}{shape_text(output.shape)}", _held_to(output, known=output.name in errors)


def _held_to(output: TensorOutput | StateTensor, *, known: bool) -> str:
    """Says what a result is compared by. `known`: eager's own error was recorded."""
    tolerance = output.tolerance
    if tolerance.ranking_of is not None:
        text = f"ranks `{tolerance.ranking_of}`"
    elif tolerance.atol == ANY_VALUE:
        text = "any values"
    elif known:
        text = "as accurate as eager"
    elif tolerance.rtol == tolerance.atol == 0:
        text = "exact"
    else:
        text = f"rtol {tolerance.rtol:g}, atol {tolerance.atol:g}"
    return text + (f", rows of `{tolerance.rows_of}`" if tolerance.rows_of is not None else "")


def state_rows(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    """Yields of every state tensor its name, its dtype and shape, its bytes, who uses it, and what it is held to."""
    errors = recorded_state_errors(manifest.cases)
    for index, state in enumerate(manifest.state):
        size = bytes_text(state_row_bytes(state)) + "".join(
            f" for each {each.dimension}" for each in state.shape if not isinstance(each, int)
        )
        yield (
            state.name,
            f"{state.dtype}{shape_text(state.shape)}",
            size,
            _users_text(manifest, index),
            "begins as zeros" if state.initial is None else "begins with stored values",
            _held_to(state, known=state.name in errors),
        )


def _users_text(manifest: Manifest, index: int) -> str:
    uses = [(method.name, use.written) for method in manifest.methods for use in method.state if use.index == index]
    writers, readers = ([name for name, written in uses if written is wanted] for wanted in (True, False))
    parts = [("written by", writers), ("read by", readers)]
    return "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)


def dimension_text(call: Call) -> str:
    """Returns such as `batch 1..64, gh 8..96`; empty if every size is fixed."""
    return ", ".join(f"{dimension.name} {dimension.min}..{dimension.max}" for dimension in call.dimensions)


def target_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Returns of every target its name, what it needs, and which torch built it."""
    return [(target.name, _target_text(target, manifest.libraries)) for target in manifest.targets]


def _target_text(target: Target, libraries: Sequence[Library]) -> str:
    """Says what a target and its operators' libraries need, and which torch built it."""
    if target.device == "cpu":
        device = f"CPU {target.cpu_isa}" if target.cpu_isa else "CPU"
    else:
        device = f"CUDA {target.cuda_architecture}" + _other_gpus(target)
    loaded = [e for e in libraries if e.platform == target.platform and e.device in ("cpu", target.device)]
    bound = {each.torch_bound: Path(each.record).name for each in loaded if each.torch_bound}
    needs = f"torch {target.needs_torch} or newer"
    if bound:
        needs = f"torch {' and '.join(bound)} only, as {', '.join(bound.values())}"
    return f"{device}, {target.platform}, {needs} (built with {target.built_with_torch})"


def _other_gpus(target: Target) -> str:
    """Says which other GPUs run a target: those of its generation natively, later ones by PTX, or none."""
    name = target.cuda_architecture or ""
    if name.endswith("a"):
        return " and no other GPU"
    return f" and later sm_{name.rstrip('f')[3:-1]}x" + (", newer ones by PTX" if target.cuda_ptx else "")


def library_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Returns of every library its file, what it contains, and what it needs."""
    return [(Path(library.record).name, _library_text(library)) for library in manifest.libraries]


def _library_text(library: Library) -> str:
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


def operators_rows(reader: PackageReader) -> list[tuple[str, str]]:
    """Returns the targets for whose GPU the operators have no machine code, and what happens on such a GPU."""
    then = {"ptx": "the driver compiles their PTX for this GPU at the first call", "no": "this GPU does not run them"}
    return [
        (fit.target.name, f"the operators {fit.namespace}::* have code for {fit.code}: {then[fit.degree]}")
        for fit in operators_fits(reader.manifest, reader.read)
        if fit.degree != "native"
    ]


def onnx_rows(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    """Yields what the ONNX models of all methods need, then the name, the size and the digest of each file."""
    if manifest.onnx:
        yield "opset", str(manifest.onnx[0].opset)
    for onnx in manifest.onnx:
        name = "model" if len(manifest.onnx) == 1 else f"model of {onnx.method}"
        yield name, bytes_text(onnx.size), onnx.sha256
        if onnx.data is not None:
            yield "weights", bytes_text(onnx.data.size), onnx.data.sha256, onnx.data.name


def operator_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Returns of every operator which library or ONNX function computes it, and its schema, which may be long."""
    given = {each.name: Path(library.record).name for library in manifest.libraries for each in library.defines}
    if not manifest.onnx:
        return [(given.get(operator.name, NOT_HERE), operator.schema) for operator in manifest.operators]
    return [(_functions_text(manifest.onnx, operator), operator.schema) for operator in manifest.operators]


def _functions_text(models: Sequence[Onnx], operator: Operator) -> str:
    names = [
        f"{function.domain}::{function.name}" + (f":{function.overload}" if function.overload else "")
        for onnx in models
        for function in onnx.functions
        if function.operator == operator.name
    ]
    return f"function {', '.join(dict.fromkeys(names))}" if names else "inlined"
