"""Exports a model to ONNX: the model, and a sidecar with the manifest and the recorded cases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exportkit.errors import HostError, UsageError
from exportkit.export.artifact import manifest_of, traced_model, traced_records
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.placement import usable_device
from exportkit.export.models.resolved import ResolvedModel
from exportkit.onnx.files import MethodModel, write_onnx
from exportkit.onnx.onnx_options import OnnxOptions
from exportkit.package.manifest import Manifest, Operator
from exportkit.progress import Progress, silent
from exportkit.spec import ExportSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEEDED = ("onnx", "onnx_ir", "onnxscript", "onnxruntime")


def export_onnx(
    model: ResolvedModel | ExportSpec,
    out: Path,
    options: TraceOptions = TraceOptions(),
    onnx_options: OnnxOptions = OnnxOptions(),
    *,
    progress: Progress = silent,
) -> Manifest:
    """Traces a model, converts it to ONNX, records cases, and writes the model and its sidecar.

    Each custom operator becomes an ONNX function in the domain of its namespace, so that stock ONNX Runtime runs the
    model. ONNX Runtime has loaded the model before anything is written.

    Args:
        model: The result of `resolve`, or a spec.
        out: The `.onnx` to write. Of several methods, each gets a model of its own, such as `out.decode.onnx`. They are
            replaced only if everything succeeds.
        options: How to trace the model.
        onnx_options: How to write it.
        progress: Called with a description of each step.

    Returns:
        The sidecar's manifest.

    Raises:
        UsageError: An option names an unknown parameter, dimension, dtype or operator.
        OperatorNotExportableError: A custom operator cannot be traced.
        ExportError: torch.export refused the model, a custom operator has no decomposition, or ONNX has no counterpart
            of an operator. The message explains which.
        HostError: The packages that `exportkit[onnx]` installs are missing, or this machine does not have the device.
    """
    _check_installed()
    from exportkit.onnx.convert import convert
    from exportkit.onnx.trial import check_loads

    device = usable_device(options.device)
    # ONNX has rules of its own for NaN, ties and zeros, so eager is no judge of them.
    traced = traced_model(model, out, replace(options, edge_cases=False), device, progress)
    spec = model if isinstance(model, ExportSpec) else model.spec
    _check_named(onnx_options.decompositions, traced.operators)
    names = {operator.name for operator in traced.operators}
    models = []
    for method in traced.methods:
        of = f" of {method.name}" if len(traced.methods) > 1 else ""
        converted = convert(
            method.program,
            method.packaged,
            traced.state,
            opset=onnx_options.opset,
            inline=onnx_options.inline,
            decompositions={**spec.decompositions, **onnx_options.decompositions},
            progress=progress,
        )
        progress(f"loading the model{of} into ONNX Runtime")
        check_loads(converted.model, converted.lines)
        converted.model.graph.name = traced.name
        models.append(
            MethodModel(converted.model, tuple(each for each in converted.functions if each.operator in names))
        )
    progress(f"writing {out}")
    return write_onnx(
        out,
        models,
        manifest_of(traced, options.version),
        traced_records(traced),
        opset=onnx_options.opset,
        data_threshold=onnx_options.data_threshold,
    )


def _check_installed() -> None:
    """Refuses a machine without the packages that conversion needs: HostError."""
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            said = f"exporting to ONNX needs {name}, which cannot be imported: {error}"
            raise HostError(said, hint="Install what it needs with `pip install 'exportkit[onnx]'`.") from error


def _check_named(decompositions: Mapping[str, Any], operators: Sequence[Operator]) -> None:
    """Refuses a decomposition of an operator that the model does not call: its name may be misspelt."""
    names = [operator.name for operator in operators]
    for name in decompositions:
        if name not in names:
            said = f"there is a decomposition of {name}, which the model does not call"
            raise UsageError(said, hint=f"It calls {', '.join(names) or 'no custom operator'}.")
