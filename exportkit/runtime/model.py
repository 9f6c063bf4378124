"""A loaded package, which is called like the exported module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, overload

import torch

from exportkit.errors import ManifestConsistencyError, ModelClosedError, ModelRunError, UsageError, WeightsError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.package.structure import builder
from exportkit.runtime.case_tensors import read_case, tensor_text
from exportkit.runtime.graphs import GraphReport, empty_inputs, graph_report
from exportkit.runtime.inputs import InputPlan, describe_tensor
from exportkit.runtime.requests import Answers, use_own_stream
from exportkit.runtime.runner import Runner
from exportkit.runtime.weights import Weights, WeightsSource, mapped_weights, replaced_weights


@dataclass(frozen=True, eq=False)
class LoadedCase:
    """A call that was recorded at export. `model(*case.args, **case.kwargs)` repeats it.

    All tensors but the references are on the model's device.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        outputs: The output of the eager model.
        sizes: The value of each dimension, by name.
        references: By output, on the CPU, what eager should have answered: FORMAT.md, "Verdicts".
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Any
    sizes: Mapping[str, int]
    references: Mapping[str, torch.Tensor]


class Model:
    """A loaded package. Call it like the exported module.

    Outputs have no gradients. Any number of threads may call it. Running calls finish even if the model is closed.

    Attributes:
        manifest: The package's manifest.
        target: The compiled target that was chosen.
        device: The device of the target and of its inputs.
        cases: The recorded cases. Each is read from the package on access.
    """

    def __init__(
        self,
        reader: PackageReader,
        target: package.Target,
        plan: InputPlan,
        runner: Runner,
        construct: Callable[[Weights, Runner | None], Runner] | None = None,
    ) -> None:
        """Takes over the open package and the runner. Use `exportkit.load`.

        `construct` makes a runner with other weights and the graphs of the old one; None if `swap_weights` does not use
        it.
        """
        self.manifest = reader.manifest
        self.target = target
        self.device = plan.device
        self.cases = Cases(reader, plan.device)
        self._reader = reader
        self._runner: Runner | None = runner
        self._construct = construct
        self._changing = threading.Lock()  # allows one swap at a time, and none after close()
        self._inputs = plan
        self._host_inputs = InputPlan(self.manifest.call, torch.device("cpu"), reason="where requests begin")
        self._build_result = plan.build_result
        self._output_count = len(self.manifest.call.outputs)
        self.__signature__ = self._inputs.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model.

        Args:
            *args: The arguments that were positional at export. They may also be given by name.
            **kwargs: The arguments that were given by name at export.

        Returns:
            The module's output, with tensors on the model's device.

        Raises:
            InputError: The package does not allow these inputs. Nothing was run.
            ModelRunError: The compiled code failed.
            ModelClosedError: The model was closed.
        """
        runner = self._open_runner()
        inputs = self._inputs.prepare(args, kwargs)
        try:
            outputs = runner.run(inputs)
        except RuntimeError as error:
            raise self._run_error(error, inputs) from error
        if len(outputs) != self._output_count:
            raise ManifestConsistencyError(
                f"target {self.target.name} returned {len(outputs)} tensors; the manifest lists {self._output_count}"
            )
        return self._build_result(outputs)

    def run_requests(self, requests: Sequence[Sequence[torch.Tensor]], outputs: Sequence[int]) -> Answers:
        """Runs several requests in one call, from the CPU's memory and back: what a server does with a batch.

        Args:
            requests: For each request its flat inputs in the manifest's order, on the CPU, to be joined along axis 0.
            outputs: The numbers of the outputs that are wanted, in the manifest's order.

        Returns:
            The outputs with the rows of all requests, on the CPU, and how long each step took.

        Raises:
            InputError: The package does not allow an input of a request, or of all together. Nothing was run.
            UsageError: The number of an output is negative or too large.
            ModelRunError: The compiled code failed.
            ModelClosedError: The model was closed.
        """
        runner = self._open_runner()
        if unknown := [number for number in outputs if not 0 <= number < self._output_count]:
            raise UsageError(
                f"there is no output {unknown[0]}: the package has {self._output_count}",
                hint="`manifest.call.outputs` lists them. The first has number 0.",
            )
        prepared = self._host_inputs.prepare_requests(requests)
        try:
            return runner.run_requests(prepared, outputs)
        except RuntimeError as error:
            raise self._run_error(error, [tensor for request in prepared for tensor in request]) from error

    def use_own_stream(self) -> None:
        """Gives this thread a CUDA stream, so that its calls run beside other threads'. Does nothing on a CPU."""
        use_own_stream(self.device)

    def _open_runner(self) -> Runner:
        runner = self._runner  # close() in another thread cannot remove the caller's reference
        if runner is None:
            raise ModelClosedError(f"the model {self.manifest.name} was closed")
        return runner

    def _run_error(self, error: RuntimeError, inputs: Sequence[torch.Tensor]) -> ModelRunError:
        return ModelRunError(
            f"the compiled model failed on ({', '.join(tensor_text(tensor) for tensor in inputs)}): "
            f"{str(error).partition(chr(10))[0]}",
            hint="CUDA does not work in a fork of a process that used it: use the start method spawn."
            if self.device.type == "cuda" and torch.cuda._is_in_bad_fork()
            else "The operator's own message may be on stderr: torch's C interface drops it.",
        )

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return self._runner is not None

    def capture(self, **sizes: int) -> dict[str, torch.Tensor]:
        """Makes a CUDA graph for calls of these sizes, and keeps it: `model.capture(batch=1, gh=28, gw=28)`.

        Args:
            **sizes: The value of each dimension of the package.

        Returns:
            The graph's own inputs, by name. A call with these copies none; most graphs read any call's inputs where
            they are. After `swap_weights` there are new ones.

        Raises:
            UsageError: The package does not allow these sizes, or it was loaded without `cuda_graphs`.
            ModelRunError: Calls of these sizes cannot be a graph. They run without one.
            ModelClosedError: The model was closed.
        """
        runner = self._open_runner()
        inputs = empty_inputs(self.manifest.call, sizes, self.device)
        try:
            owned = runner.capture(list(inputs.values()))
        except RuntimeError as error:
            raise ModelRunError(
                f"calls with {', '.join(f'{name}={size}' for name, size in sizes.items())} cannot be a CUDA graph: "
                f"{str(error).partition(chr(10))[0]}",
                hint="They run without one.",
            ) from error
        if owned is None:
            raise self._without_graphs()
        return dict(zip(inputs, owned))

    @property
    def cuda_graphs(self) -> GraphReport:
        """The CUDA graphs that there are now. Raises UsageError if it was loaded without `cuda_graphs`."""
        report = self._open_runner().graph_report()
        if report is None:
            raise self._without_graphs()
        return graph_report(report, self.manifest.call)

    def _without_graphs(self) -> UsageError:
        return UsageError(
            f"{self.manifest.name} was loaded without CUDA graphs",
            hint="`exportkit.load(..., cuda_graphs=True)`, or with a list of sizes.",
        )

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights that `swap_weights` replaces; empty if they are inside the compiled code."""
        return tuple(weight.name for weight in self.manifest.weights if weight.state)

    def swap_weights(self, source: WeightsSource) -> None:
        """Replaces the weights with another fine-tune's, while calls continue.

        Each call runs with only the old weights or only the new ones; running calls finish with the old ones. A swap
        that fails leaves the old weights in place. During the swap, both need memory.

        Args:
            source: A safetensors file, or tensors by name. It must have the model's whole state_dict with the same
                dtypes and shapes. A tied weight may have any of its names. The tensors are copied.

        Raises:
            WeightsError: The weights do not fit the model, or the model's weights are inside the compiled code.
            ModelLoadError: torch's loader refused the code that it loaded before.
            ModelRunError: The CUDA graphs that `capture` made cannot be made again.
            ModelClosedError: The model was closed.
        """
        if not self.weights:
            raise WeightsError(
                f"{self.manifest.name} has no weights outside its compiled code",
                hint="To swap weights, export the model without --embed-weights.",
            )
        with self._changing:
            if self._construct is None:
                raise ModelClosedError(f"the model {self.manifest.name} was closed")
            weights = replaced_weights(self.manifest, [self.target], mapped_weights(self._reader), source)
            # torch's runner has a second buffer for this, but a failure midway would leave mixed weights, and running
            # calls on a GPU might read the buffer while the next swap writes it. So a second runner is made.
            runner = self._construct(weights, self._runner)
            self._reader.check_unchanged()
            self._runner = runner

    def close(self) -> None:
        """Lets go of the compiled code and the file. Calls that have begun in other threads finish first."""
        with self._changing:
            self._runner = self._construct = None
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        inputs = ", ".join(map(describe_tensor, self.manifest.call.inputs))
        state = f"{self.target.name} on {self.device}" if self._runner is not None else "closed"
        return f"<exportkit.Model {self.manifest.name} {self.manifest.version}, {state}: ({inputs})>"


class Cases(Sequence[LoadedCase]):
    """The recorded cases of a package. Each is read, and its digest checked, on access."""

    def __init__(self, reader: PackageReader, device: torch.device) -> None:
        """Reads from an open package and moves tensors to `device`."""
        self._reader = reader
        self._device = device

    def __len__(self) -> int:
        return len(self._reader.manifest.cases)

    @overload
    def __getitem__(self, index: int) -> LoadedCase: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LoadedCase]: ...
    def __getitem__(self, index: int | slice) -> LoadedCase | Sequence[LoadedCase]:
        """Reads a case.

        Raises:
            IndexError: The case does not exist.
            PackageError: The record is damaged, or its tensors differ from the manifest.
            ModelClosedError: The model was closed.
        """
        cases = self._reader.manifest.cases
        if isinstance(index, slice):
            return [self._read(case) for case in cases[index]]
        return self._read(cases[index])

    def _read(self, case: package.Case) -> LoadedCase:
        if self._reader.fileno() < 0:
            raise ModelClosedError(f"the model {self._reader.manifest.name} was closed, and its package with it")
        call, tensors = self._reader.manifest.call, read_case(self._reader, case)
        inputs, outputs = ([tensor.to(self._device) for tensor in part] for part in (tensors.inputs, tensors.outputs))
        values = {parameter: builder(parameter.value)(inputs) for parameter in call.parameters}
        return LoadedCase(
            args=tuple(value for parameter, value in values.items() if parameter.kind == "positional"),
            kwargs={parameter.name: value for parameter, value in values.items() if parameter.kind == "keyword"},
            outputs=builder(call.result)(outputs),
            sizes=dict(case.sizes),
            references=tensors.references,
        )
