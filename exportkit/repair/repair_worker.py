"""The process that traces a model, compiles it with one choice of options after the other, and times the results."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._inductor import config

from exportkit.child.messages import serve
from exportkit.child.offline import go_offline
from exportkit.errors import CompilerError, ExportError
from exportkit.export.artifact import manifest_of, traced_model, write_compiled
from exportkit.export.compiling.compile_failure import failed_operator
from exportkit.export.compiling.compile_plan import CompilePlan
from exportkit.export.eager_calls.cases import eager_mode
from exportkit.export.eager_calls.eager_methods import EagerMethods
from exportkit.export.models.placement import parse_floating, prepared, usable_device
from exportkit.export.programs.resolve import resolve
from exportkit.export.tracing.traced import Traced
from exportkit.package.trust import Trust
from exportkit.progress import silent
from exportkit.repair.repair_commands import (
    CallsTimed,
    CompileModel,
    ModelCompiled,
    ModelTraced,
    NotCompiled,
    TimeCalls,
    TraceModel,
)
from exportkit.runtime.loader import load

_TIMED_SECONDS = 0.5  # for each of what is compared


class Repairer:
    """The traced model, and the model that it was traced from."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._command: TraceModel
        self._traced: Traced
        self._plan: CompilePlan
        self._eager: EagerMethods

    def trace(self, command: TraceModel) -> ModelTraced:
        """Traces the model. From then on, this process has no network."""
        self._command = command
        device = usable_device(command.trace.device)
        self._plan = CompilePlan.of(command.compiling, device)
        resolved = resolve(
            command.model,
            model_kwargs=command.model_kwargs,
            inputs=command.inputs,
            weights=Path(command.weights) if command.weights else None,
            op_libraries=[Path(each) if each.startswith("/") else each for each in command.op_libraries],
            seed=command.seed,
            trust=Trust(command.keys, Path(command.signature) if command.signature else None),
            trusted=command.trusted,
        )
        self._traced = traced_model(resolved, Path(command.output), command.trace, device, silent)
        spec = self._stack.enter_context(prepared(resolved.spec, device, parse_floating(command.trace.dtype)))
        self._eager = EagerMethods(spec)
        go_offline()
        manifest = manifest_of(self._traced, command.trace.version)
        return ModelTraced(
            manifest=msgspec.json.encode(manifest).decode(),
            device=device.type,
            cpu_isa=self._plan.cpu_isas[0],
            halves=any(_has_halves(method.program) for method in self._traced.methods),
            known=tuple(config.get_config_copy()),
        )

    def compile(self, command: CompileModel) -> ModelCompiled | NotCompiled:
        """Compiles the model with more options."""
        plan = replace(
            self._plan,
            inductor_config={**self._plan.inductor_config, **command.inductor_config},
            eager_kernels=(*self._plan.eager_kernels, *command.eager_kernels),
        )
        try:
            write_compiled(self._traced, Path(command.output), plan, version=self._command.trace.version)
        except (CompilerError, ExportError) as error:
            found = failed_operator(error)
            return NotCompiled(error.message, found.name if found else None, found.where if found else "")
        return ModelCompiled()

    def time(self, command: TimeCalls) -> CallsTimed:
        """Times the calls of the example inputs, one of each method."""
        with ExitStack() as stack, torch.no_grad():
            stack.enter_context(eager_mode(tf32=self._command.trace.tf32))
            calls = [self._eager_calls()]
            for artifact in command.artifacts:
                model: Any = stack.enter_context(load(artifact, self._plan.device))
                if any(method.state for method in self._traced.methods):
                    model = stack.enter_context(model.session())
                calls.append(self._package_calls(model))
            eager, *artifacts = _milliseconds(calls, self._plan.device)
        return CallsTimed(eager, tuple(artifacts))

    def _eager_calls(self) -> Callable[[], object]:
        session = self._eager.session()
        bound = {
            name: self._eager.bind(name, entry.example_inputs, entry.example_kwargs)
            for name, entry in self._eager.entries.items()
        }
        if self._eager.buffers:
            return lambda: [session.call(name, call, copies=False) for name, call in bound.items()]
        entries = self._eager.entries
        return lambda: [entries[name].model(*call.args, **call.kwargs) for name, call in bound.items()]

    def _package_calls(self, model: Any) -> Callable[[], object]:
        entries = self._eager.entries
        called = [(getattr(model, name) if len(entries) > 1 else model, entry) for name, entry in entries.items()]
        return lambda: [call(*entry.example_inputs, **entry.example_kwargs) for call, entry in called]


def _has_halves(program: torch.export.ExportedProgram) -> bool:
    values = [node.meta.get("val") for node in program.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in dtypes)


def _milliseconds(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Returns the median time of each, measured in turns."""
    for call in calls:
        call()
    samples: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + _TIMED_SECONDS * len(calls)
    while time.perf_counter() < end or len(samples[0]) < 3:
        for call, times in zip(calls, samples):
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
    return [1e3 * statistics.median(times) for times in samples]


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    with ExitStack() as stack:
        worker = Repairer(stack)
        serve(connection, {TraceModel: worker.trace, CompileModel: worker.compile, TimeCalls: worker.time})
