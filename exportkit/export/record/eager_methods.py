"""Calls the methods of an eager model, with state that belongs to a session: what a package is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.export.models.call_signature import BoundCall, describe_call, look_into_dataclasses
from exportkit.export.models.method_specs import method_specs, written_names
from exportkit.export.record.state_buffers import StateBuffer, holding, own_copy, settled, state_buffers
from exportkit.export.torch_patches.gradients import asks, gradients_of
from exportkit.package.manifest import Call, PackagedMethod, StateTensor
from exportkit.spec import ExportSpec

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class EagerAnswer:
    """What a method answered. What shared memory with the state or a written input is a copy."""

    result: Any
    outputs: tuple[torch.Tensor, ...]
    written: Mapping[str, torch.Tensor]


class EagerMethods:
    """The methods of an eager model. Its own buffers stay as they are: each session has its own.

    Attributes:
        specs: By method, a spec of a module whose `forward` is the method.
        buffers: The buffers that are state.
        called: The methods that were called once: whether they ask for gradients is known.
    """

    def __init__(self, spec: ExportSpec) -> None:
        """Finds the methods and the state of a spec, whose model is in eval mode and on its device.

        Raises:
            UsageError: The spec names a method or state that the model does not have.
        """
        self.specs: dict[str, ExportSpec] = method_specs(spec)
        self.buffers: tuple[StateBuffer, ...] = state_buffers(spec)
        self.spec = spec
        self.called: set[str] = set()

    def bind(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """Splits a call of a method into its parts.

        Raises:
            UsageError: The call does not fit the method.
        """
        return describe_call(self.specs[method].model, args, kwargs)

    def written(self, method: str, bound: BoundCall) -> tuple[str, ...]:
        """Returns the names of the input tensors that a method is declared to write."""
        return written_names(bound.names, self.specs[method].writes)

    def session(self, sizes: Mapping[str, int] | None = None) -> EagerSession:
        """Opens a session, whose state begins as the model's, and has its sizes if none are given."""
        return EagerSession(self, sizes or {})


@dataclass(frozen=True)
class DescribedModel:
    """An eager model with its description for the manifest, by which its calls are drawn and recorded.

    `tf32`: the model, but not its reference, may use TF32.
    """

    eager: EagerMethods
    methods: Sequence[PackagedMethod]
    state: Sequence[StateTensor] = ()
    device: torch.device = _CPU
    tf32: bool = False

    def call_of(self, method: str) -> Call:
        """Returns the description of a method's call."""
        return next(each.call for each in self.methods if each.name == method)


class EagerSession:
    """A sequence of calls of an eager model, and its state.

    A call that raises leaves the state half written: `reset` it.
    """

    def __init__(
        self, methods: EagerMethods, sizes: Mapping[str, int], state: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._methods = methods
        self._sizes = dict(sizes)
        self._state = dict(state) if state is not None else self._new()

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The state by name: memory that later calls may change."""
        return {name: tensor.detach() for name, tensor in self._state.items()}

    def reset(self) -> None:
        """Gives the state the values that a new session has."""
        self._state = self._new()

    def fork(self) -> EagerSession:
        """Returns a session that goes on from here by itself."""
        copies = {name: own_copy(tensor, tensor.requires_grad) for name, tensor in self._state.items()}
        return EagerSession(self._methods, self._sizes, copies)

    def call(self, method: str, bound: BoundCall, *, copies: bool = True) -> EagerAnswer:
        """Calls a method.

        With `copies`, the method gets copies of all inputs, so that the call's own do not change; else only of those
        that it is declared to write.

        Raises:
            UsageError: The model has assigned to a state buffer what cannot be state.
            Exception: Whatever the model raises.
        """
        model = self._methods.specs[method].model
        if method in self._methods.called:
            return self._call(method, bound, copies=copies)
        self._methods.called.add(method)
        before = self.fork()._state
        try:
            return self._call(method, bound, copies=copies)
        except RuntimeError as error:
            if not asks(model, error):
                raise
        self._state = dict(before)
        return self._call(method, bound, copies=copies)

    def _call(self, method: str, bound: BoundCall, *, copies: bool) -> EagerAnswer:
        model = self._methods.specs[method].model
        wanted = self._methods.written(method, bound)
        given = tuple(
            t.clone() if copies or name in wanted else t.detach() for name, t in zip(bound.names, bound.tensors)
        )
        args, kwargs = bound.with_tensors(given)
        buffers = self._methods.buffers
        in_place = {name: self._state[buffer.name] for buffer in buffers for name in buffer.names}
        with holding(model, in_place) as now_in, gradients_of(model):
            result = model(*args, **kwargs)
            now = {
                buffer.name: settled(self._state[buffer.name], {name: now_in(name) for name in buffer.names})
                for buffer in buffers
            }
        look_into_dataclasses(result)
        changing = [*self._state.values(), *(t for name, t in zip(bound.names, given) if name in wanted)]
        # Memory of a new tensor may be that of another state or of the result.
        self._state = {name: new if new is self._state[name] else own_copy(new, False) for name, new in now.items()}
        result = tree_map_only(torch.Tensor, lambda t: t.detach() if t.requires_grad else t, result)
        if changing:
            result = tree_map_only(torch.Tensor, lambda t: own_copy(t, False) if _shares(t, changing) else t, result)
        outputs = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return EagerAnswer(result, outputs, {name: t for name, t in zip(bound.names, given) if name in wanted})

    def _new(self) -> dict[str, torch.Tensor]:
        return {buffer.name: buffer.at(self._sizes) for buffer in self._methods.buffers}


def _shares(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    if tensor.layout is not torch.strided:
        return False
    address = tensor.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == address for other in others)
