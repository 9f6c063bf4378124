"""A function as a model, and the usual ways to trace one: in this process, for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exportkit import ExportSpec
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.call_signature import describe_call
from exportkit.export.models.resolved import EagerModel
from exportkit.export.sizes.shapes import DynamicSizes, dynamic_sizes
from exportkit.export.trace.torch_export import TracingTask
from exportkit.export.trace.trace import trace
from exportkit.export.trace.traced import Traced
from exportkit.package.manifest import Manifest

CPU = torch.device("cpu")
Shapes = dict[str, dict[int, str]]


class FunctionModel(nn.Module):
    """A model of one function: the function's parameters are its inputs.

    torch keeps the lines of operators in the files of a model's classes: who asks for them needs a class of its own.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def spec_of(function: Callable[..., Any], *inputs: Any, shapes: Any = None, **fields: Any) -> ExportSpec:
    """What exports a function, or a module, called with these inputs."""
    model = function if isinstance(function, nn.Module) else FunctionModel(function)
    return ExportSpec(model, inputs, dynamic_shapes={} if shapes is None else shapes, **fields)


def traced(spec: ExportSpec, said: list[str] | None = None, **options: Any) -> Traced:
    """A spec as it is traced, which compares it with eager. What is said on the way goes into `said`."""
    return trace(EagerModel(spec), TraceOptions(**options), CPU, (said if said is not None else []).append)


def exported(spec: ExportSpec, folder: Path, said: list[str] | None = None, **options: Any) -> Manifest:
    """Exports a program to x.pt2 of a folder, which compares it with eager at the sizes and values of its cases."""
    progress = (said if said is not None else []).append
    return export_program(EagerModel(spec), folder / "x.pt2", TraceOptions(**options), progress=progress)


def tracing_task(spec: ExportSpec) -> tuple[TracingTask, DynamicSizes]:
    """What torch.export is given for a spec, before anything of exportkit judges it."""
    task = TracingTask(spec, describe_call(spec.model, spec.example_inputs, spec.example_kwargs))
    return task, dynamic_sizes(spec.dynamic_shapes, task.examples)
