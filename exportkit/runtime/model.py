"""A loaded package, which is called like the exported module."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self

import torch

from exportkit.errors import ModelClosedError, ModelRunError, UsageError, WeightsError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.runtime.graphs import GraphReport, empty_inputs, graph_report
from exportkit.runtime.inputs import InputPlan
from exportkit.runtime.loaded_cases import Cases
from exportkit.runtime.methods import LoadedMethod, MethodPlan, ModelCode, describe_call
from exportkit.runtime.native import NativeRunner, try_rows
from exportkit.runtime.requests import Answers, TriedRows, use_own_stream
from exportkit.runtime.runner import Construction
from exportkit.runtime.session import Session
from exportkit.runtime.state import LocalState, State, StatePlan, empty_state, no_room
from exportkit.runtime.weights import WeightsSource, replaced_weights
from exportkit.sizes import checked_sizes, label_of


class Model:
    """A loaded package. Call it like the exported module; `model.decode(...)` calls its method `decode`.

    Outputs have no gradients. Any number of threads may call it. Running calls finish even if the model is closed.
    A method with state is called in a session: `model.session()`.

    Attributes:
        manifest: The package's manifest.
        target: The compiled target that was chosen.
        device: The device of the target and of its inputs.
        methods: The methods by name: those whose name is an attribute's as well.
        cases: The recorded cases. Each is read from the package on access.
    """

    def __init__(
        self,
        reader: PackageReader,
        target: package.Target,
        code: ModelCode,
        construction: Construction | None = None,
    ) -> None:
        """Takes over the open package and its code. Use `exportkit.load`.

        `construction` makes code with other weights; None if `swap_weights` does not use it.
        """
        self.manifest = reader.manifest
        self.target = target
        self.device = code.device
        self.cases = Cases(reader, code.device)
        self.methods: Mapping[str, LoadedMethod] = MappingProxyType(
            {name: LoadedMethod(code, plan) for name, plan in code.plans.items()}
        )
        self._reader = reader
        self._code = code
        self._construction = construction
        self._changing = threading.Lock()  # allows one swap at a time, and none after close()
        self._state = StatePlan(reader, code.device)
        self._host_inputs: dict[str, InputPlan] = {}  # by method
        default = self.manifest.default
        self.__signature__ = self.methods[default.name].__signature__ if default else inspect.signature(self.__call__)
        self._default = self.methods[default.name] if default else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`, or the only method.

        Returns:
            The method's output, with tensors on the model's device.

        Raises:
            UsageError: There are several methods, and none is `forward`; or it has state.
            InputError, ModelRunError, ModelClosedError: As for `LoadedMethod.__call__`.
        """
        method = self._default
        return (method or self.methods[self.manifest.method().name])(*args, **kwargs)

    def __getattr__(self, name: str) -> LoadedMethod:
        """Returns a method by name."""
        methods: Mapping[str, LoadedMethod] = self.__dict__.get("methods", {})
        if name not in methods:
            said = f"the model has no attribute {name!r}; its methods are {', '.join(methods)}"
            if hasattr(torch.nn.Module, name):
                said += ". It is in eval mode, `exportkit.load` chose its device, and `swap_weights` takes a state_dict"
            raise AttributeError(said)
        return methods[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.methods})

    def session(self, **sizes: int) -> Session:
        """Makes a session: state of its own, with the values that it has at the beginning.

        Args:
            **sizes: The number of each dimension that the state has, such as `batch=3`.

        Raises:
            UsageError: A size is missing, unknown or out of its range. The message lists what is needed.
            ModelRunError: There is no memory for the state.
            ModelClosedError: The model was closed.
        """
        self._code.open_runners()
        checked = checked_sizes(f"the state of {self.manifest.name}", self._state.dimensions, sizes)
        try:
            return Session(self._code, self._new_state(checked), checked)
        except RuntimeError as error:
            raise no_room(error) from error

    def _new_state(self, sizes: Mapping[str, int]) -> State:
        return LocalState.new(self._code, self._state, sizes)

    def run_requests(
        self, requests: Sequence[Sequence[torch.Tensor]], outputs: Sequence[int], method: str | None = None
    ) -> Answers:
        """Runs several requests in one call, from the CPU's memory and back: what a server does with a batch.

        Args:
            requests: For each request its flat inputs in the manifest's order, on the CPU, to be joined along axis 0.
            outputs: The numbers of the outputs that are wanted, in the manifest's order.
            method: The method that is called. Default: `forward`, or the only one.

        Returns:
            The outputs with the rows of all requests, on the CPU, and how long each step took.

        Raises:
            InputError: The package does not allow an input of a request, or of all together. Nothing was run.
            UsageError: The number of an output is negative or too large, or the method has state or writes inputs.
            ModelRunError: The compiled code failed.
            ModelClosedError: The model was closed.
        """
        plan = self._code.plan(method)
        runner = self._code.runner(plan.name)
        if plan.state:
            said = f"{plan.name} of {self.manifest.name} has state, so requests cannot be joined for it"
            raise UsageError(said, hint="`run_steps` joins steps of sessions.")
        return self._run_joined(plan, runner.run_requests, requests, outputs)

    def run_steps(
        self,
        steps: Sequence[tuple[Session, Sequence[torch.Tensor]]],
        outputs: Sequence[int],
        method: str | None = None,
    ) -> Answers:
        """Runs a step of several sessions in one call, where `try_rows` allows it. See `run_requests`.

        Args:
            steps: Sessions of this process, which nobody else calls meanwhile, each with its flat inputs.
            outputs: The numbers of the outputs that are wanted.
            method: The method that is called.

        Raises:
            UsageError: As `run_requests`; or the C++ runtime does not run the package in this process.
            SessionClosedError: A session was closed.
            InputError, ModelRunError, ModelClosedError: As `run_requests`. No session was changed.
        """
        plan = self._code.plan(method)
        runner = self._code.runner(plan.name)
        if not isinstance(runner, NativeRunner):
            raise UsageError(f"only the C++ runtime joins steps of {plan.name}, for sessions of its own process")
        states = [list(session.state.values()) for session, _ in steps]
        used = [state[index] for state in states for index in plan.state]
        written = [place for place, index in enumerate(plan.state) if index in plan.written_state]
        run = functools.partial(runner.run_requests, states=used, written=written)
        return self._run_joined(plan, run, [inputs for _, inputs in steps], outputs)

    def _run_joined(
        self,
        plan: MethodPlan,
        run: Callable[[list[list[torch.Tensor]], Sequence[int]], Answers],
        requests: Sequence[Sequence[torch.Tensor]],
        outputs: Sequence[int],
    ) -> Answers:
        if plan.inputs.written:
            raise UsageError(
                f"{plan.name} of {self.manifest.name} writes into its inputs, so requests cannot be joined for it"
            )
        count = len(plan.call.outputs)
        if unknown := [number for number in outputs if number not in range(count)]:
            said = f"there is no output {unknown[0]}: the package has {count}"
            raise UsageError(said, hint="`call.outputs` of the method lists them. The first has number 0.")
        if (host := self._host_inputs.get(plan.name)) is None:
            host = InputPlan(plan.call, torch.device("cpu"), reason="where requests begin")
            self._host_inputs[plan.name] = host
        prepared = host.prepare_requests(requests)
        try:
            return run(prepared, outputs)
        except RuntimeError as error:
            raise self._code.run_error(plan, error, [each for request in prepared for each in request]) from error

    def try_rows(self, method: str, most: int) -> TriedRows:
        """Finds out by the recorded cases whether the rows of one request, or of one session, influence another's.

        Args:
            method: The method that is called.
            most: The most rows of a call. There will be fewer if the model fails on so many.

        Raises:
            ModelRunError: The recorded cases cannot be read or run.
            ModelClosedError: The model was closed.
        """
        runners = self._code.open_runners()
        try:
            return try_rows(self._reader, self.target.name, self.device, runners, method, most)
        except RuntimeError as error:
            raise ModelRunError(f"the rows of {method} cannot be tried: {str(error).partition(chr(10))[0]}") from error

    def synchronize(self) -> None:
        """Waits for this thread's current stream. Does nothing on a CPU, where each call says what it refuses.

        Nobody waits for a call on a GPU, so a value that the model refuses, such as an index out of range, shows at the
        next call on the stream, or here.

        Raises:
            RefusedValueError: A call on the stream, outside of sessions, met such a value. Its results are not to be
                used.
            ModelClosedError: The model was closed.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
            for name, runner in self._code.open_runners().items():
                self._code.look(self._code.plans[name], runner)

    def use_own_stream(self) -> None:
        """Gives this thread a CUDA stream, so that its calls run beside other threads'. Does nothing on a CPU."""
        use_own_stream(self.device)

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return self._code.runners is not None

    def capture(self, method: str | None = None, /, **sizes: int) -> dict[str, torch.Tensor]:
        """Makes a CUDA graph for calls of these sizes, and keeps it: `model.capture(batch=1, gh=28, gw=28)`.

        Args:
            method: The method that is called. Default: `forward`, or the only one.
            **sizes: The value of each dimension of the method.

        Returns:
            The graph's own inputs, by name. A call with these copies none; most graphs read any call's inputs where
            they are. After `swap_weights` there are new ones. Any session's state is used where it is.

        Raises:
            UsageError: The package does not allow these sizes, or it was loaded without `cuda_graphs`.
            ModelRunError: Calls of these sizes cannot be a graph. They run without one.
            ModelClosedError: The model was closed.
        """
        plan = self._code.plan(method)
        runner = self._code.runner(plan.name)
        inputs = empty_inputs(plan.call, sizes, self.device)
        state = empty_state(plan, sizes)
        try:
            owned = runner.capture(inputs + state, len(inputs))
        except RuntimeError as error:
            said = f"calls with {label_of(sizes)} cannot be a CUDA graph: {str(error).partition(chr(10))[0]}"
            raise ModelRunError(said, hint="They run without one.") from error
        if owned is None:
            raise self._without_graphs()
        return {tensor.name: own for tensor, own in zip(plan.call.inputs, owned)}

    def capture_all(self, sizes: Mapping[str, int]) -> None:
        """Makes a CUDA graph of each method whose dimensions these are. Raises the errors of `capture`."""
        plans = self._code.plans.values()
        fitting = [plan for plan in plans if {each.name for each in plan.call.dimensions} == sizes.keys()]
        if not fitting and len(self.methods) > 1:
            said = f"no method of {self.manifest.name} has the dimensions {', '.join(sizes) or '(none)'}"
            raise UsageError(said, hint="`methods[name].call.dimensions` lists those of a method.")
        for plan in fitting or plans:
            self.capture(plan.name, **sizes)

    @property
    def cuda_graphs(self) -> GraphReport:
        """The CUDA graphs that there are now. Raises UsageError if it was loaded without `cuda_graphs`."""
        reports = {name: runner.graph_report() for name, runner in self._code.open_runners().items()}
        found = {name: report for name, report in reports.items() if report is not None}
        if not found:
            raise self._without_graphs()
        return graph_report(found, {name: plan.described for name, plan in self._code.plans.items()})

    def _without_graphs(self) -> UsageError:
        text = f"{self.manifest.name} was loaded without CUDA graphs"
        return UsageError(text, hint="`exportkit.load(..., cuda_graphs=True)`, or with a list of sizes.")

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights that `swap_weights` replaces; empty if they are inside the compiled code."""
        return tuple(weight.name for weight in self.manifest.weights if weight.state)

    def swap_weights(self, source: WeightsSource) -> None:
        """Replaces the weights with another fine-tune's, while calls continue.

        Each call runs with only the old weights or only the new ones; running calls finish with the old ones. A swap
        that fails leaves the old weights in place. During the swap, both need memory.
        Sessions keep their state and go on with the new weights.

        Args:
            source: A safetensors file, or tensors by name. It must have the model's whole state_dict with the same
                dtypes and shapes. A tied weight may have any of its names. The tensors are copied. State may be left
                out; sessions go on beginning as at export, so other state is refused.

        Raises:
            WeightsError: The weights do not fit the model, come with other state than sessions begin with, or are
                inside the compiled code.
            ModelLoadError: torch's loader refused the code that it loaded before.
            ModelRunError: The CUDA graphs that `capture` made cannot be made again.
            ModelClosedError: The model was closed.
        """
        if not self.weights:
            raise WeightsError(
                f"{self.manifest.name} has no weights outside its compiled code",
                hint="Parameters that are state belong to sessions, which load_state replaces. "
                * bool(self.manifest.state)
                + "To swap weights, export the model without --embed-weights.",
            )
        with self._changing:
            if self._construction is None:
                raise ModelClosedError(f"the model {self.manifest.name} was closed")
            weights = replaced_weights(self._reader, self.manifest, [self.target], source)
            # torch's runner has a second buffer for this, but a failure midway would leave mixed weights, and running
            # calls on a GPU might read the buffer while the next swap writes it. So second runners are made.
            runners = self._construction.make(weights, self._code.runners)
            self._reader.check_unchanged()
            self._code.runners = runners

    def close(self) -> None:
        """Lets go of the compiled code and the file. Calls that have begun in other threads finish first."""
        with self._changing:
            self._code.runners = self._construction = None
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied or pickled: a copy would close the same file a second time."""
        raise UsageError(
            f"the model {self.manifest.name} cannot be pickled or copied: its code is loaded into this process",
            hint="Send the package's path, and call exportkit.load in each process, such as in a DataLoader's "
            "worker_init_fn. Threads may share one model.",
        )

    def __repr__(self) -> str:
        alone = list(self.methods) == ["forward"]
        calls = [("" if alone else name) + describe_call(method.call) for name, method in self.methods.items()]
        state = f"{self.target.name} on {self.device}" if self._code.runners is not None else "closed"
        return f"<exportkit.Model {self.manifest.name} {self.manifest.version}, {state}: {', '.join(calls)}>"
