"""The methods of a loaded package, and their compiled code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from exportkit.errors import ManifestConsistencyError, ModelClosedError, ModelRunError, RefusedValueError, UsageError
from exportkit.package import manifest as package
from exportkit.package.archive import PackageReader
from exportkit.package.compiled_with import REFUSED
from exportkit.runtime.graphs import Described
from exportkit.runtime.inputs import InputPlan, describe_tensor
from exportkit.runtime.runner import Runner
from exportkit.runtime.state_file import identity


class MethodPlan:
    """How a method is called, planned once: its call, the checks of its inputs, and the arguments that its code takes.

    `described` are the inputs, then the state, which has indices in the manifest's `state`. `written` is what the code
    writes, by index of its arguments. `interrupted` is why a session is broken while a call runs.
    """

    def __init__(self, manifest: package.Manifest, method: package.PackagedMethod, device: torch.device) -> None:
        """Plans the calls of a method on a device."""
        self.name = method.name
        self.call = method.call
        self.inputs = InputPlan(method.call, device)
        self.state = tuple(use.index for use in method.state)
        self.written_state = tuple(use.index for use in method.state if use.written)
        self.interrupted = f"a call of {method.name} was interrupted"
        self.described: tuple[Described, ...] = (
            *method.call.inputs,
            *(manifest.state[use.index] for use in method.state),
        )
        uses = [tensor.written is not None for tensor in method.call.inputs] + [use.written for use in method.state]
        self.written = tuple(place for place, written in enumerate(uses) if written)


def plan_methods(manifest: package.Manifest, device: torch.device) -> dict[str, MethodPlan]:
    """Plans the calls of all methods on a device."""
    return {method.name: MethodPlan(manifest, method, device) for method in manifest.methods}


class ModelCode:
    """The compiled code of a model's methods. A swap of the weights replaces all of it, and closing lets go of it.

    The model, its methods and its sessions share this object, and none of them refers to another.
    """

    def __init__(
        self, reader: PackageReader, plans: Mapping[str, MethodPlan], device: torch.device, runners: Runners
    ) -> None:
        """Takes a runner for each method of an open package."""
        self.manifest = reader.manifest
        self.state_identity = identity(reader)
        self.reader = reader
        self.plans = plans
        self.device = device
        self.runners: Runners | None = runners
        self._default = plans[reader.manifest.default.name] if reader.manifest.default else None

    def runner(self, method: str) -> Runner:
        """Returns the code for a new call of a method. Raises ModelClosedError if the model was closed."""
        return self.open_runners()[method]

    def open_runners(self) -> Runners:
        """Returns the code of all methods. Raises ModelClosedError if the model was closed."""
        runners = self.runners  # close() in another thread cannot remove the caller's reference
        if runners is None:
            raise ModelClosedError(f"the model {self.manifest.name} was closed")
        return runners

    def plan(self, method: str | None = None) -> MethodPlan:
        """Returns a method's plan by name, or the default one's. Raises UsageError if there is none."""
        if method is None and self._default is not None:
            return self._default
        return self.plans[self.manifest.method(method).name]

    def run(
        self, plan: MethodPlan, run: Callable[[list[torch.Tensor]], list[torch.Tensor]], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Runs a method's code on its arguments, and returns the flat outputs, as many as the manifest says.

        ModelRunError: the compiled code failed.
        """
        try:
            outputs = run(inputs)
        except RuntimeError as error:
            raise self.run_error(plan, error, inputs) from error
        finally:
            if plan.written:  # saved for a backward pass, their old values are lost
                torch.autograd.graph.increment_version([inputs[place] for place in plan.written if place < len(inputs)])
        if len(outputs) != len(plan.call.outputs):
            raise ManifestConsistencyError(
                f"{plan.name} returned {len(outputs)} tensors; the manifest lists {len(plan.call.outputs)}"
            )
        return outputs

    def look(self, plan: MethodPlan, runner: Runner, refused: torch.Tensor | None = None) -> None:
        """Raises RefusedValueError if a call that has ended refused a value: see `Runner.look`."""
        try:
            runner.look(refused)
        except RuntimeError as error:
            raise self.run_error(plan, error, []) from error

    def run_error(self, plan: MethodPlan, error: RuntimeError, inputs: Sequence[torch.Tensor]) -> ModelRunError:
        """Returns the error for compiled code that failed."""
        where = "the compiled model" if len(self.plans) == 1 else f"the compiled method {plan.name}"
        said = str(error).partition("\n")[0]
        if said.startswith(REFUSED):
            return RefusedValueError(
                f"{where} refused a value, as eager does: {said.removeprefix(REFUSED)}",
                hint="Correct the input, and reset the session, or load a state."
                if plan.written_state
                else "Correct the input. The next call runs as usual.",
            )
        if self.device.type == "cuda" and torch.cuda._is_in_bad_fork():
            hint = "CUDA does not work in a fork of a process that used it: use the start method spawn."
        else:
            hint = "The operator's own message may be on stderr: torch's C interface drops it."
        if names := [f"`{plan.call.inputs[place].name}`" for place in plan.inputs.written]:
            hint += f" {', '.join(names)} may be half written."
        inputs = inputs[: len(plan.call.inputs)] if plan.state else inputs
        return ModelRunError(f"{where} failed on ({_tensors_text(inputs)}): {said}", hint=hint)


def _tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """Returns such as "float32[2, 3], int64[2]"."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)


Runners = Mapping[str, Runner]  # by method


class LoadedMethod:
    """A method of a loaded package. Call it like the exported module's.

    Attributes:
        name: Its name.
        call: The manifest's call.
        stateful: Whether it reads or writes state, so that it needs a session.
    """

    def __init__(self, code: ModelCode, plan: MethodPlan) -> None:
        """Binds a method to the code of a model."""
        self.name = plan.name
        self.call = plan.call
        self.stateful = bool(plan.state)
        self.__signature__ = plan.inputs.signature
        self._code = code
        self._plan = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method.

        Args:
            *args: The arguments that were positional at export. They may also be given by name.
            **kwargs: The arguments that were given by name at export.

        Returns:
            The method's output, with tensors on the model's device.

        Raises:
            InputError: The package does not allow these inputs. Nothing was run.
            UsageError: The method has state.
            RefusedValueError: The code met a value that eager refuses, too. See `Model.synchronize` about GPUs.
            ModelRunError: The compiled code failed.
            ModelClosedError: The model was closed.
        """
        plan, code = self._plan, self._code
        if plan.state:
            names = ", ".join(code.manifest.state[index].name for index in plan.state[:3])
            more = ", ..." if len(plan.state) > 3 else ""
            said = f"{self.name} of {code.manifest.name} has state ({names}{more}), which belongs to a session"
            raise UsageError(said, hint=f"`session = model.session()`, then `session.{self.name}(...)`.")
        runner = code.open_runners()[plan.name]
        outputs = code.run(plan, runner.run, plan.inputs.prepare(args, kwargs))
        return plan.inputs.build_result(outputs)

    def __repr__(self) -> str:
        return f"<exportkit method {self.name} of {self._code.manifest.name}: {describe_call(self.call)}>"


def describe_call(call: package.Call) -> str:
    """Returns such as "(image: float32[batch, 3, 16*gh, 16*gw])"."""
    return f"({', '.join(map(describe_tensor, call.inputs))})"
