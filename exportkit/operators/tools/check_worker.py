"""The child process of `exportkit.operators.tools.checking`."""

from __future__ import annotations

import resource
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch._ops import OpOverload

from exportkit.child.messages import serve
from exportkit.errors import ExportkitError, UsageError
from exportkit.export.models.importing import import_code
from exportkit.export.models.placement import prepared, usable_device
from exportkit.export.models.resolve import load_operator_libraries, parse_dtype, resolve, resolve_decompositions
from exportkit.export.models.source_lines import users_code, where_now
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.torch_patches.dispatch import OperatorMode, watched_by
from exportkit.export.torch_patches.opaque import composite_calls, run_composite
from exportkit.export.trace.preflight import is_custom, qualified_name
from exportkit.operators.contract.check import check_operator
from exportkit.operators.contract.definition import checks
from exportkit.operators.contract.findings import Finding, OperatorReport, Severity
from exportkit.operators.contract.operator_spec import OpSpec
from exportkit.operators.contract.operator_trial import Subject, first_line, is_out_of_memory
from exportkit.operators.contract.sample import Sample, bound_arguments
from exportkit.operators.tools.checking import (
    Checked,
    CheckOne,
    Origin,
    Prepare,
    Prepared,
    chosen,
)
from exportkit.operators.tools.collected_calls import Collector
from exportkit.operators.tools.forms import Argument, arguments_of
from exportkit.operators.tools.journal import Journal
from exportkit.operators.tools.registered import devices_of, gradient_of, has_schema, newly_registered, overload
from exportkit.operators.tools.source import load
from exportkit.schema_text import schema_text
from exportkit.spec import ExportSpec

_WITHOUT_CUDA = "Leave --device out: every operator is called where it has kernels."


_OTHER_CALLS = "Give simpler calls: --calls '{name}=FILE.py:function', a function that yields (args, kwargs)."


class _Worker:
    """The operators that this process has loaded, and what is known of them."""

    def __init__(self, command: Prepare) -> None:
        self.options, self.source = command.options, command.source
        options = self.options
        if unknown := [name for name in options.only if name not in checks()]:
            raise UsageError(f"there is no check {unknown[0]!r}", hint=f"The checks are: {', '.join(checks())}.")
        self.dtypes = tuple(map(parse_dtype, options.dtypes))
        self.device = None if options.device == "auto" else usable_device(options.device, _WITHOUT_CUDA)
        self.recorded: dict[str, list[Sample]] = {}
        self.references: dict[str, Callable[..., Any]] = {}
        with newly_registered() as registered:
            if command.source.kind == "model":
                self._run_model(command.source.text)
            else:
                load_operator_libraries(self._libraries())
                load(command.source)
            specs = _specs(options.specs)
            names = sorted(self.recorded) if command.source.kind == "model" else registered()
        self.specs = {f"{spec.namespace}::{spec.name}": spec for spec in specs}
        self.operators = chosen([name for name in names if has_schema(name)], options.operators)
        self.references |= resolve_decompositions(self._full_names(options.references))
        calls = self._full_names(options.calls)
        functions = resolve_decompositions(calls)
        self.given = {name: calls_of_function(text, functions[name]) for name, text in calls.items()}
        self.journal = Journal(Path(command.journal), options.timeout, Launches().error)
        _limit_memory(options.memory)

    def _full_names(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Returns what the user gave by operator, by the operators' full names."""
        return {name: text for given, text in texts.items() for name in chosen(self.operators, [given])}

    def check(self, command: CheckOne) -> Checked:
        try:
            return self._check(command)
        except ExportkitError:
            raise
        except Exception as error:  # such as no memory for a call's values: the other operators are still checked
            name, said = command.operator, first_line(error)
            hint = "--max-memory gives the process more." if is_out_of_memory(said) else _OTHER_CALLS.format(name=name)
            return Checked(_report(name), "none", f"the check itself failed: {said}", hint)
        finally:
            self.journal.rest()

    def _check(self, command: CheckOne) -> Checked:
        name, operator, options = command.operator, overload(command.operator), self.options
        if not (devices := self._devices(name)):
            there = ", ".join(devices_of(name)) or "no device"
            return Checked(_report(name), "none", f"it has kernels for {there}, and none of them can be used here")
        held = []
        own: Origin = "model" if name in self.recorded else "SPEC" if name in self.specs else "drawn"
        origins: list[Origin] = [own, "given"] if name in self.given else [own]
        for origin in origins:  # each is held to all checks, so that no call takes the place of another's
            limits = options.seed, options.most_calls, command.varied
            collector = Collector(origin, operator, self.journal, devices, self.dtypes, command.avoid, *limits)
            self._collect(name, collector)
            held.append((collector, self._held(collector, command)))
        report = _together([report for _, report in held])
        if found := [collector.origin for collector, _ in held if collector.calls]:
            calls = [call for collector, _ in held for call in collector.calls]
            return Checked(report, " and ".join(found), never_tried=never_tried(operator, calls, report))
        hint = f"Give calls: --calls '{name}=FILE.py:function', a function that yields (args, kwargs)."
        return Checked(report, "none", f"no valid call was found: {held[-1][0].why_none}", hint)

    def _held(self, collector: Collector, command: CheckOne) -> OperatorReport:
        """Holds the operator to the checks on calls of one origin."""
        name, before = command.operator, tuple(collector.findings.values())
        if not collector.calls:
            return replace(_report(name), findings=before, calls=collector.tried)
        spec = self.specs.get(name)
        subject = Subject(
            collector.operator,
            tuple(collector.calls),
            self.references.get(name, spec.reference if spec else None),
            spec,
            None if collector.origin == "SPEC" else collector.resized,
        )
        wanted = [check for check in self.options.only or checks() if check not in command.without]
        found, failures = _found(subject, wanted, collector)
        findings = (*before, *map(self._advised, found.findings), *failures, *self._unseen())
        return replace(found, findings=findings, calls=found.calls + collector.tried)

    def _unseen(self) -> Iterator[Finding]:
        """Yields the first launch that failed without a word of the operator."""
        for call, said in list(self.journal.unseen.items())[:1]:
            message = f"The launch of a kernel failed ({said}), and the operator returned as if it had run."
            hint = "Look after each launch: C10_CUDA_KERNEL_LAUNCH_CHECK() or STD_CUDA_KERNEL_LAUNCH_CHECK()."
            yield Finding("launch", Severity.broken, message, call, hint)
        self.journal.unseen.clear()

    def _advised(self, finding: Finding) -> Finding:
        """Adds to the advice what follows from the source: a shared library alone shows no fakes in Python."""
        if finding.check != "fake-runs" or self.source.kind != "file":
            return finding
        also = f"If a .py file registers it: exportkit ops check FILE.py --op-library {shlex.quote(self.source.text)}"
        return replace(finding, hint=f"{finding.hint} {also}")

    def _collect(self, name: str, collector: Collector) -> None:
        if collector.origin == "SPEC":
            collector.samples_of(self.specs[name])
        elif collector.origin == "drawn":
            collector.drawn()
        else:
            collector.varied((self.given if collector.origin == "given" else self.recorded)[name])

    def _run_model(self, model: str) -> None:
        options = self.options
        spec = resolve(model, inputs=options.inputs, op_libraries=self._libraries(), seed=options.seed).spec
        self.recorded = calls_of_model(spec, self.device or torch.device("cpu"))
        self.references |= spec.decompositions

    def _libraries(self) -> list[Path | str]:
        return [Path(text) if Path(text).is_file() else text for text in self.options.libraries]

    def _devices(self, name: str) -> list[torch.device]:
        has, cuda = devices_of(name), torch.cuda.is_available()
        wanted = [self.device] if self.device else [torch.device("cpu"), *([torch.device("cuda")] if cuda else [])]
        return [device for device in wanted if device.type in has or "any" in has]


def _found(subject: Subject, wanted: list[str], collector: Collector) -> tuple[OperatorReport, list[Finding]]:
    """Runs checks. Returns what they found, and which of them failed themselves."""
    failures: list[Finding] = []
    while wanted:
        try:
            with collector.watching():
                return check_operator(subject, wanted, collector.progress), failures
        except Exception as error:  # the operator is a stranger's, and may be what no check was written for
            check = collector.check
            if check not in wanted:
                raise
            wanted.remove(check)
            message = f"The check could not be made: {first_line(error)}"
            failures.append(Finding(check, Severity.doubtful, message, hint=_OTHER_CALLS.format(name=subject.name)))
    return _report(subject.name), failures


def _report(name: str) -> OperatorReport:
    """Returns the report of an operator before any check."""
    return OperatorReport(name, schema_text(overload(name)._schema), (), {}, (), 0)


def _together(reports: Sequence[OperatorReport]) -> OperatorReport:
    """Returns what was found with any of the calls, once for each check."""
    findings: dict[str, Finding] = {}
    for finding in (finding for report in reports for finding in report.findings):
        findings.setdefault(finding.check, finding)
    passed = dict.fromkeys(check for report in reports for check in report.passed if check not in findings)
    reasons = {check: reason for report in reports for check, reason in report.skipped.items()}
    return replace(
        reports[0],
        passed=tuple(passed),
        skipped={check: reason for check, reason in reasons.items() if check not in findings and check not in passed},
        findings=tuple(findings.values()),
        calls=sum(report.calls for report in reports),
    )


def _specs(texts: Sequence[str]) -> list[OpSpec]:
    """Returns the SPECs that are named, or else those of the modules that were imported with the operators."""
    if not texts:
        modules = [module for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
        return [value for module in modules for value in list(vars(module).values()) if issubclass(type(value), OpSpec)]
    found: list[OpSpec] = []
    for text in texts:
        module, _, attribute = text.rpartition(":")
        with users_code(f"importing {text}"):
            value = getattr(import_code(module), attribute, None) if module else None
        if not isinstance(value, OpSpec):
            raise UsageError(f"--spec {text} names no OpSpec", hint="Write package.module:SPEC or path/file.py:SPEC.")
        found.append(value)
    return found


def _limit_memory(allowed: int | None) -> None:
    """Lets allocations fail, rather than let the kernel end another process of this machine."""
    if allowed is None:
        allowed = _kilobytes("/proc/meminfo", "MemAvailable") * 1024 // 2
    limit = _kilobytes("/proc/self/status", "VmData") * 1024 + allowed
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _kilobytes(file: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))


def main(connection: socket.socket) -> None:
    """Entry point of the child."""
    worker: list[_Worker] = []

    def prepare(command: Prepare) -> Prepared:
        worker.append(_Worker(command))
        return Prepared({name: schema_text(overload(name)._schema) for name in worker[-1].operators})

    def check(command: CheckOne) -> Checked:
        return worker[-1].check(command)

    serve(connection, {Prepare: prepare, CheckOne: check})


class Launches:
    """Asks the GPU after each call."""

    def __init__(self) -> None:
        self._canary: torch.Tensor | None = None

    def error(self) -> str | None:
        """Waits for the GPU. Returns what went wrong since the last time, in CUDA's words, or None."""
        if not torch.cuda.is_initialized():
            return None
        try:
            with torch.no_grad():
                if self._canary is None:
                    self._canary = torch.zeros(1, device="cuda")
                self._canary.add_(1)  # a launch finds the error of one that nobody has looked at
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).strip().partition("\n")[0].removeprefix("CUDA error: ")
        return None


# --- calls that are known to be valid ---------------------------------------------------------------------------------


_OF_EACH = 8  # calls of an operator, of those with other shapes, dtypes or numbers


class _Recorder(OperatorMode):
    """Keeps the calls of custom operators, with copies of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Sample]] = {}
        self._seen: set[tuple[str, str]] = set()

    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._keep(func, args, kwargs)
        return func(*args, **kwargs)

    def composite(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keeps a call that a mode does not see."""
        self._keep(func, args, kwargs)
        return run_composite(func, args, kwargs)

    def _keep(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_custom(func):
            name, place = qualified_name(func), where_now()
            call = Sample(f"called at {place}" if place else "called by the model", args, kwargs).copied()
            calls, form = self.calls.setdefault(name, []), (name, _form(call))
            if form not in self._seen and len(calls) < _OF_EACH:
                self._seen.add(form)
                calls.append(call)


def calls_of_model(spec: ExportSpec, device: torch.device) -> dict[str, list[Sample]]:
    """Runs a model on its example inputs, and returns its calls of custom operators, by the operator's name."""
    doing = users_code("running the model on its example inputs")
    recorder = _Recorder()
    seen = composite_calls(device, recorder.composite)
    with prepared(spec, device, None) as placed, seen, watched_by(recorder), doing:
        eager = EagerMethods(placed)
        for name, each in eager.specs.items():
            eager.session().call(name, eager.bind(name, each.example_inputs, each.example_kwargs))
    return recorder.calls


def calls_of_function(text: str, function: Callable[[], Any]) -> list[Sample]:
    """Calls a function that yields (args, kwargs), which the user named so.

    Raises:
        UsageError: It yields something else, or nothing.
        ExportError: It raised an error.
    """
    with users_code(f"calling {text}"):
        found = function()
        given = list(found) if isinstance(found, Iterable) else [found]
    calls = []
    for number, each in enumerate(given):
        if not (
            isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], tuple) and isinstance(each[1], dict)
        ):
            said = f"{text} yielded {type(each).__name__}, not a pair of a tuple and a dict"
            raise UsageError(said, hint="Yield (args, kwargs), such as `yield (torch.randn(2, 3), 0.5), {}`.")
        calls.append(Sample(f"call {number} of {text}", *each))
    if not calls:
        raise UsageError(f"{text} yields no calls", hint="Yield (args, kwargs), once for each call.")
    return calls


def _form(call: Sample) -> str:
    """Says which calls are alike: those with the same dtypes, shapes and numbers."""
    numbers = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: None, (call.args, dict(call.kwargs)))
    return f"{[(t.dtype, tuple(t.shape), t.stride()) for t in call.tensors]} {numbers}"


# --- what the calls of a check leave out, so that "ok" is not read as more than it says -------------------------------


_PLACES = ("Device", "Layout", "MemoryFormat", "Generator")  # there is mostly one that fits


def never_tried(operator: OpOverload, calls: Sequence[Sample], report: OperatorReport) -> tuple[str, ...]:
    """Says which arguments had one value in all calls, and why values and gradients were not checked."""
    bound = [bound_arguments(operator, call.args, call.kwargs) for call in calls]
    arguments = [a for a in arguments_of(operator._schema) if a.kind not in _PLACES]
    said = [text for a in arguments for text in _said(a, [values[a.name] for values in bound])]
    if "reference" in report.skipped and "own-float64" in report.skipped:
        said.append(f"values not compared: {report.skipped['reference']}")
    gradient = report.skipped.get("gradcheck")
    if gradient is not None and gradient_of(report.operator) and "gradient-reference" not in report.passed:
        said.append(f"gradient not checked: {gradient}")
    return tuple(said)


def _said(argument: Argument, values: Sequence[Any]) -> Iterator[str]:
    if all(value is None for value in values):
        yield f"{argument.name} is never given"
    elif argument.listed:
        lengths = {len(value) for value in values if value is not None}
        if argument.length is None and len(lengths) == 1:
            yield f"the length of {argument.name} is always {lengths.pop()}"
    elif not argument.is_tensor and len(different := {repr(value) for value in values}) == 1:
        yield f"{argument.name} is always {different.pop()}"
