"""What is timed: packages, which are loaded, and the eager model in several ways."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exportkit.bench.results import OURS, OURS_EAGER, OURS_GRAPHS
from exportkit.bench.timing import Within
from exportkit.errors import UsageError
from exportkit.export.models.eager_model import rebuild_eager
from exportkit.export.record.cases import state_sha256
from exportkit.export.record.eager_methods import EagerMethods
from exportkit.export.torch_patches.gradients import in_its_mode
from exportkit.installed import DescribedOperator, described_operators
from exportkit.package.manifest import Call, Manifest, PackagedMethod
from exportkit.package.trust import Trust
from exportkit.progress import Progress
from exportkit.reference_model import ReferenceModel, unnamed
from exportkit.runtime.loader import load
from exportkit.runtime.model import Model


class WithReferences:
    """A context in which modules that imported an operator's wrapper call its reference.

    Create it after the model is imported. Entering it is cheap, so single timed calls can use references. Operators
    that a model calls through torch.ops are not replaced; `NoOperators` finds them.
    """

    def __init__(self, operators: Iterable[DescribedOperator]) -> None:
        references = {id(spec.wrapper): (spec.wrapper, spec.reference) for spec in operators}
        modules = {wrapper.__module__ for wrapper, _ in references.values()}
        library = {module.rpartition(".")[0] or module for module in modules}  # its own calls stay as they are
        self._places: list[tuple[ModuleType, str, Any, Any]] = [
            (module, name, *references[id(value)])
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType)
            and not any(f"{module.__name__}.".startswith(f"{package}.") for package in library)
            for name, value in list(vars(module).items())
            if id(value) in references
        ]

    def __enter__(self) -> None:
        for module, name, _, reference in self._places:
            setattr(module, name, reference)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for module, name, wrapper, _ in self._places:
            setattr(module, name, wrapper)


class OperatorCalledError(Exception):
    """An operator ran inside `NoOperators`."""


class NoOperators(TorchDispatchMode):
    """Raises OperatorCalledError if an operator of a namespace is called, which a model on references never does."""

    def __init__(self, namespaces: Collection[str]) -> None:
        super().__init__()
        self._namespaces = namespaces

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs other operators."""
        if func.namespace in self._namespaces:
            raise OperatorCalledError(func.name())
        return func(*args, **(kwargs or {}))


EAGER, COMPILE, REDUCE_OVERHEAD = "eager", "compile", "reduce-overhead"
ALTERNATIVES = (EAGER, COMPILE)

COMPILERS: Mapping[str, Mapping[str, Any]] = {
    COMPILE: {},
    "max-autotune": {"mode": "max-autotune"},
    REDUCE_OVERHEAD: {"mode": "reduce-overhead"},
    "freezing": {"options": {"freezing": True}},
}
"""Ways to compile the eager model, with the arguments of torch.compile."""


@dataclass(frozen=True)
class PackageOptions:
    """The alternatives and the sizes to time, for so many seconds each.

    `against`: "eager" and names of COMPILERS. None takes eager and "compile" if the eager model can be made, and
    "reduce-overhead" with `cuda_graphs`, which times the first package with CUDA graphs, too. `sizes`: such as
    "batch=8,gh=28,gw=28"; none: the sizes of the recorded calls. `eager` names operator libraries for packages that do
    not contain them, too. `onnx`: a model with the package's inputs and outputs, which ONNX Runtime runs on the CPU,
    with its signature beside it.
    """

    against: Sequence[str] | None = None
    method: str | None = None
    sizes: Sequence[str] = ()
    seconds: float = 1.0
    seed: int = 0
    eager: ReferenceModel = ReferenceModel()
    onnx: Path | None = None
    trust: Trust = Trust()
    cuda_graphs: bool = False


@dataclass(frozen=True)
class TimedPackage:
    """A loaded package, and how long loading took; None if it was loaded before."""

    name: str
    model: Model
    what: str
    load_ms: float | None = None


def load_packages(
    paths: Sequence[Path], device: torch.device, options: PackageOptions, stack: ExitStack, progress: Progress
) -> list[TimedPackage]:
    """Loads packages that have equal methods. The first one is loaded with CUDA graphs too, if the options say so.

    UsageError: a method has other inputs or outputs than in the first package.
    """
    trust: dict[str, Any] = {"public_key": options.trust.keys or None, "signature": options.trust.signature}
    found: list[TimedPackage] = []
    for path in paths:
        progress(f"loading {path.name}")
        start = time.perf_counter()
        model = stack.enter_context(load(path, device=str(device), **trust))
        took = (time.perf_counter() - start) * 1e3
        if found:
            check_interface(path, model.manifest.methods, paths[0], found[0].model.manifest.methods)
        what = f"exportkit.load, target {model.target.name}"
        found.append(TimedPackage(str(path) if found else OURS, model, what, took))
    if options.cuda_graphs:
        graphs = stack.enter_context(load(paths[0], device=str(device), cuda_graphs=True, **trust))
        found.append(TimedPackage(OURS_GRAPHS, graphs, "exportkit.load(..., cuda_graphs=True)"))
    return found


def check_interface(
    path: Path, methods: Sequence[PackagedMethod], first: Path, expected: Sequence[PackagedMethod]
) -> None:
    """Refuses what is called differently from the first package."""
    if _interfaces(methods) != _interfaces(expected):
        raise UsageError(f"{path} and {first.name} have different inputs or outputs")


def _interfaces(methods: Sequence[PackagedMethod]) -> Any:
    """Returns the parts of methods that packages must have in common to be compared."""
    return {
        method.name: (
            method.call.parameters,
            [(tensor.name, tensor.dtype, tensor.shape, tensor.written is None) for tensor in method.call.inputs],
            [(output.name, output.dtype) for output in method.call.outputs],
            bool(method.state),
        )
        for method in methods
    }


def eager_model(
    manifest: Manifest, device: torch.device, options: PackageOptions, stack: ExitStack, progress: Progress
) -> tuple[EagerMethods | None, str | None]:
    """Returns the eager model on the device, or why there is none.

    UsageError: it is asked for and there is none, or it is not the one that was exported.
    """
    if options.against is not None and not options.against:
        return None, None
    by, source = options.trust.demanded_by(), manifest.source
    model = options.eager.model_of(source.model, by)
    if model is None:
        reason = unnamed(source.model, by)
        if options.against is not None:
            raise UsageError(f"cannot compare with eager: {reason}")
        return None, reason
    progress(f"making the eager model {model}")
    eager = replace(options.eager, model=model)
    spec = stack.enter_context(rebuild_eager(eager, source, manifest.methods, manifest.state, device))
    if state_sha256(spec.model, spec.state) != source.state_sha256:
        said = f"the weights of {model} have changed since it was exported"
        raise UsageError(said, hint="Export it again, or give the weights of the export (--weights).")
    return EagerMethods(spec), None


def alternatives(options: PackageOptions) -> Sequence[str]:
    """Returns the names of the ways to run the eager model."""
    if options.against is not None:
        return options.against
    return (*ALTERNATIVES, REDUCE_OVERHEAD) if options.cuda_graphs else ALTERNATIVES


def described_of(manifest: Manifest) -> dict[str, DescribedOperator]:
    """Returns the operators of the package's namespaces that installed packages describe with references."""
    return described_operators(operator.name for operator in manifest.operators)


@dataclass(frozen=True)
class EagerWay:
    """A way to run the eager model: with the arguments of torch.compile, or as it is; within a context."""

    name: str
    what: str
    compiler: Mapping[str, Any] | None = None
    within: Within = nullcontext

    def of(self, model: torch.nn.Module) -> Callable[..., Any]:
        """Returns what to call."""
        function = model if self.compiler is None else torch.compile(model, dynamic=False, **self.compiler)
        return in_its_mode(model, function)


def eager_ways(manifest: Manifest, replaced: bool, options: PackageOptions) -> list[EagerWay]:
    """Returns the ways to run the eager model that are timed. References may have replaced its operators."""
    forms = described_of(manifest)
    what = "the eager model"
    if forms:
        what += ", references for operators" if replaced else ", with its operators: it calls them through torch.ops"
    plain = WithReferences(forms.values()) if replaced else nullcontext()
    ways = []
    if EAGER in alternatives(options):
        ways.append(EagerWay(EAGER, what, within=lambda: plain))
        if replaced:
            ways.append(EagerWay(OURS_EAGER, "the eager model"))
    for name in alternatives(options):
        if name in COMPILERS:
            how = "torch.compile" if name == COMPILE else f"torch.compile with {name}"
            ways.append(EagerWay(name, f"{how} of {what}", COMPILERS[name], lambda: plain))
    return ways


def dtype_of(call: Call) -> str:
    """Returns the dtype of the floating inputs of a call; of the first input if there is none."""
    dtypes = [each.dtype for each in call.inputs]
    return next((dtype for dtype in dtypes if "float" in dtype), dtypes[0] if dtypes else "none")
