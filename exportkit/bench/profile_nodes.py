"""Times each node of an exported program, not compiled, one after another."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_leaves

from exportkit.bench.machine import describe
from exportkit.bench.package_sizes import parse_sizes, size_option
from exportkit.errors import DigestMismatchError, ExportError, UsageError
from exportkit.export.eager_calls.cases import eager_mode
from exportkit.export.eager_calls.eager_methods import EagerMethods
from exportkit.export.models.placement import usable_device
from exportkit.export.models.resolved import SavedProgram
from exportkit.export.programs.program_file import load_program
from exportkit.export.programs.resolve import load_operator_libraries
from exportkit.package.archive import PackageReader
from exportkit.package.exported_graph import graph_in
from exportkit.package.manifest import Case, CaseCall, Manifest
from exportkit.package.node_times import FORMAT_VERSION, NodeTime, Profile
from exportkit.package.structure import plain
from exportkit.package.trust import Trust
from exportkit.progress import Progress
from exportkit.runtime.case_tensors import read_case
from exportkit.sizes import label_of
from exportkit.spec import FORWARD

_GETITEM = "_operator.getitem"  # is not timed: it belongs to the node whose result it takes
_WARM_UPS = 3
_MIN_RUNS, _MAX_RUNS = 5, 500


@dataclass(frozen=True)
class ProfileOptions:
    """What is timed, and where.

    Attributes:
        device: "cpu", "cuda", "cuda:N", or "auto": CUDA if there is a device.
        threads: The number of torch's CPU threads. None: torch's default.
        method: The method to time. None: the default one.
        size: The sizes of a recorded call, such as "batch=2,gh=8". None: the method's first one.
        seconds: The time to spend. There are at least five runs.
        op_libraries: Operator libraries that the program calls, or modules that load some.
        trust: Who must have signed the program.
        trusted: Whether it may be a file of torch.export.save, which is code of its author.
    """

    device: str = "auto"
    threads: int | None = None
    method: str | None = None
    size: str | None = None
    seconds: float = 1.0
    op_libraries: Sequence[Path | str] = ()
    trust: Trust = Trust()
    trusted: bool = False


class _Timed(torch.fx.Interpreter):
    """Runs a graph, and notes the milliseconds of each operator."""

    def __init__(self, module: torch.fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._wait: Callable[[], None] = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else _no_wait
        self.times: list[float] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is operator.getitem:
            return target(*args, **kwargs)
        self._wait()
        start = time.perf_counter_ns()
        answer = target(*args, **kwargs)
        self._wait()
        self.times.append((time.perf_counter_ns() - start) / 1e6)
        return answer


def profile_program(path: Path, options: ProfileOptions, progress: Progress) -> Profile:
    """Times the nodes of a program: of `exportkit export --format program`, or of torch.export.save.

    State is that of a new session. Every node waits for the one before, so that the sum is more than a call takes on a
    GPU.

    Args:
        path: The program.
        options: What is timed, and where.
        progress: Called with a description of each step.

    Raises:
        UsageError: The file has no program or no such method, or no recorded call has the given sizes.
        PackageError: The file is bad, or a required signature is missing.
        ExportError: torch cannot read the program, or read another graph than the file has.
        HostError: This machine does not have the device.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    device = usable_device(name, without_cuda="Give --device cpu, or use a machine with a GPU.")
    load_operator_libraries(options.op_libraries)
    progress(f"reading {path.name}")
    saved = load_program(path, options.trust, trusted=options.trusted)
    method = _method(saved, options.method)
    graph = graph_in(path, method)
    program = move_to_device_pass(saved.programs[method], device)
    module = program.module(check_guards=False)
    assert isinstance(module, torch.fx.GraphModule)
    targets = [node.target for node in graph.graph.nodes]
    _check_same(path, module, targets)
    sizes, inputs = _inputs(saved, method, options.size, device)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    try:
        of = "" if method == FORWARD else f" of {method}"
        progress(f"timing {len(graph.graph.nodes)} nodes{of} at {label_of(sizes)}")
        tf32 = saved.manifest is not None and saved.manifest.provenance.tf32
        with eager_mode(tf32=tf32):
            runs = _runs(module, device, inputs, options.seconds)
        machine = describe(device)
    finally:
        torch.set_num_threads(before)
    return Profile(
        format_version=FORMAT_VERSION,
        graph_sha256=graph.sha256,
        device=machine.device,
        threads=machine.threads,
        torch=str(torch.__version__),
        sizes=label_of(sizes),
        runs=len(runs),
        nodes=_node_times(targets, runs),
    )


def _check_same(path: Path, module: torch.fx.GraphModule, targets: Sequence[str]) -> None:
    """Compares the number of nodes that torch read with those in the file: the times are told apart by their places."""
    count = sum(node.op == "call_function" and node.target is not operator.getitem for node in module.graph.nodes)
    if count != len(targets) - targets.count(_GETITEM):
        raise ExportError(
            f"torch {torch.__version__} reads {count} nodes from {path}, which has {len(targets)}",
            hint="Export the program again with this torch.",
        )


def _method(saved: SavedProgram, name: str | None) -> str:
    if saved.manifest is not None:
        return saved.manifest.method(name).name
    if name not in (None, FORWARD):
        raise UsageError(f"{saved.path} has one method, {FORWARD}", hint="Leave out --method.")
    return FORWARD


def _inputs(
    saved: SavedProgram, method: str, wanted: str | None, device: torch.device
) -> tuple[Mapping[str, int], Callable[[], list[Any]]]:
    """Returns the sizes of a call, and what makes its flat inputs anew: a program may write into them."""
    eager = EagerMethods(saved.spec)
    entry = saved.spec.entries[method]
    bound = eager.bind(method, entry.example_inputs, dict(entry.example_kwargs))
    sizes: Mapping[str, int] = {}
    tensors: Sequence[torch.Tensor] = bound.tensors
    manifest = saved.manifest
    recorded = [] if manifest is None else _recorded_calls(manifest, method)
    if manifest is None or not recorded:
        if wanted is not None:
            raise UsageError(f"{saved.path} has no recorded call of {method}, so --size cannot choose one")
    else:
        asked = None if wanted is None else parse_sizes(wanted, manifest.method(method).call)
        found = next((each for each in recorded if asked in (None, each[2].sizes)), None)
        if found is None:
            known = ", ".join(dict.fromkeys(f"--size {size_option(call.sizes)}" for _, _, call in recorded))
            raise UsageError(f"{saved.path} has no recorded call of --size {wanted}", hint=f"It has {known}.")
        case, number, call = found
        with PackageReader(saved.path) as reader:
            if reader.manifest != manifest:
                raise DigestMismatchError(f"{saved.path} was replaced while it was read", hint="Run it again.")
            tensors, sizes = read_case(reader, case).calls[number].inputs, call.sizes
    state: list[torch.Tensor] = []
    if manifest is not None and manifest.method(method).state:
        session = eager.session(sizes).state
        state = [session[manifest.state[use.index].name] for use in manifest.method(method).state]

    def made() -> list[Any]:
        fresh = tuple(tensor.to(device, copy=True) for tensor in tensors)
        positional, named = bound.with_tensors(fresh)
        leaves: list[Any] = tree_leaves((plain(positional), plain(named)))
        return leaves + [tensor.to(device, copy=True) for tensor in state]

    return sizes, made


def _recorded_calls(manifest: Manifest, method: str) -> list[tuple[Case, int, CaseCall]]:
    """Returns the recorded calls of a method, each with its case and its number in that."""
    return [
        (case, number, call)
        for case in manifest.cases
        for number, call in enumerate(case.calls)
        if call.method == method
    ]


def _runs(
    module: torch.fx.GraphModule, device: torch.device, inputs: Callable[[], list[Any]], seconds: float
) -> list[list[float]]:
    """Returns the times of all nodes, run by run."""
    runs: list[list[float]] = []
    end = 0.0
    for number in range(_WARM_UPS + _MAX_RUNS):
        if number == _WARM_UPS:
            runs.clear()
            end = time.perf_counter() + seconds
        if number >= _WARM_UPS + _MIN_RUNS and time.perf_counter() > end:
            break
        timed = _Timed(module, device)
        timed.run(*inputs(), enable_io_processing=False)
        runs.append(timed.times)
    return runs


def _node_times(targets: Sequence[str], runs: Sequence[Sequence[float]]) -> tuple[NodeTime, ...]:
    samples = zip(*runs)
    return tuple(NodeTime(0, 0, 0) if target == _GETITEM else _node_time(next(samples)) for target in targets)


def _node_time(samples: Sequence[float]) -> NodeTime:
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return NodeTime(median, q1, q3)


def _no_wait() -> None:
    """On the CPU an operator has its result when it returns."""
