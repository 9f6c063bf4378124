"""Computes what eager should have answered: the same calls in a wider dtype than the model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.utils._pytree import tree_leaves

from exportkit.accuracy import eager_error
from exportkit.export.models.call_signature import BoundCall
from exportkit.export.record.state_buffers import StateBuffer, own_copy, settled
from exportkit.export.record.upcast import PRECISIONS, Upcast, cast, is_large
from exportkit.export.torch_patches.gradients import gradients_of
from exportkit.package.manifest import Accuracy, TensorOutput

_TF32_EPS = 2.0**-10  # of a product's factors


@dataclass(frozen=True)
class References:
    """What eager should have answered in one call, for the outputs for which that is known.

    Attributes:
        dtype: The dtype that it was computed in.
        outputs: By output, on the CPU: a floating output in the dtype of a case's reference, or indices.
        accuracy: By output, eager's error; None for indices.
    """

    dtype: Literal["float64", "float32"]
    outputs: Mapping[str, torch.Tensor]
    accuracy: Mapping[str, Accuracy | None]


@dataclass(frozen=True)
class Answered:
    """What eager has answered: to one call, or in the state after all.

    Attributes:
        results: The manifest's outputs, then the inputs that the call writes, named `written.<input>`; or the state.
        eager: Eager's results, by name.
        wanted: The names of the floating results that need a reference.
    """

    results: Sequence[TensorOutput] = ()
    eager: Mapping[str, torch.Tensor] = field(default_factory=dict)
    wanted: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class AnsweredCall(Answered):
    """A call that eager has answered. Its outputs as eager gave them may be others than the manifest's."""

    model: torch.nn.Module
    bound: BoundCall
    outputs: Sequence[torch.Tensor] = ()

    @property
    def written(self) -> tuple[str, ...]:
        """The inputs that the call writes."""
        names = {result.name for result in self.results}
        return tuple(name for name in self.bound.names if f"written.{name}" in names)


@dataclass(frozen=True, kw_only=True)
class SessionState(Answered):
    """The state of a session after its last call."""

    buffers: Sequence[StateBuffer] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WideAnswers:
    """What a session gives in a wide dtype, call by call. `eps` is that of the least precise dtype that was upcast."""

    dtype: torch.dtype
    parts: Sequence[Mapping[str, torch.Tensor]]
    eps: float
    decides: bool

    def far(self, *, tf32: bool = False) -> float:
        """Returns the rms error beyond which an answer and this one cannot be the same function's."""
        return 2 * math.sqrt(max(self.eps, _TF32_EPS if tf32 else 0))

    def narrowed(self, answered: Sequence[Answered]) -> list[dict[str, torch.Tensor]]:
        """Returns the parts in the dtypes of eager's, on the CPU."""
        return [
            {name: t.detach().to(each.eager[name].dtype).cpu() for name, t in part.items() if name in each.eager}
            for part, each in zip(self.parts, answered)
        ]


def wide_answers(calls: Sequence[AnsweredCall], state: SessionState = SessionState()) -> WideAnswers | None:
    """Computes the calls of a session in float64, or in float32 where float64 does not work.

    The state is computed in the wide dtype, too, and goes on from call to call. A single operator that has no kernel
    for the wide dtype runs in float32, or in the model's dtype. Returns None if no wider dtype than the model's works.
    """
    tensors = [
        tensor
        for call in calls
        for tensor in (*call.model.parameters(), *call.model.buffers(), *call.bound.tensors, *call.eager.values())
    ]
    dtypes = {tensor.dtype for tensor in tensors if tensor.dtype in PRECISIONS}
    if not dtypes:
        return None
    narrow = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    for wide in (torch.float64, torch.float32):
        if torch.finfo(wide).eps >= torch.finfo(narrow).eps:
            return None
        # Where the mode itself fails, only weights, state and inputs are upcast.
        modes = [Upcast(wide, narrow), None]
        if is_large({tensor for call in calls for tensor in call.model.parameters()}, wide):
            modes.insert(0, Upcast(wide, narrow, lazily=True))
        for mode in modes:
            session = _WideSession(wide, mode, state)
            try:
                computed = [session.call(call) for call in calls]
            except Exception:
                # The model's code may raise anything in another dtype, and its wide weights may not fit into memory.
                continue
            if all(len(each) == len(call.results) for each, call in zip(computed, calls)):
                eps = torch.finfo(mode.narrowest if mode else narrow).eps
                named = [dict(zip((r.name for r in call.results), each)) for call, each in zip(calls, computed)]
                return WideAnswers(wide, [*named, session.state], eps, mode is None or mode.decides)
    return None


def session_references(answered: Sequence[Answered], computed: WideAnswers, *, tf32: bool) -> list[References | None]:
    """Returns what eager should have answered in each call of a session, then in the state; None where that is unknown.

    A result has no reference if eager is so far from it that both cannot be the same function: the model draws random
    numbers, or decides otherwise where two values are nearly equal.
    """
    limit = computed.far(tf32=tf32)
    dtype: Literal["float64", "float32"] = "float64" if computed.dtype is torch.float64 else "float32"
    return [_credible(dtype, part, each, limit) for part, each in zip(computed.parts, answered)]


def wide_calls(
    model: torch.nn.Module, bound: BoundCall
) -> tuple[Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], list[torch.Tensor], float] | None:
    """Returns what calls a model without state in float64, its inputs, and the epsilon of what it computes in."""
    for mode in (Upcast(torch.float64, torch.float32), None):
        session, call = _WideSession(torch.float64, mode, SessionState()), AnsweredCall(model=model, bound=bound)

        def answers(
            tensors: Sequence[torch.Tensor], session: _WideSession = session, call: AnsweredCall = call
        ) -> list[torch.Tensor]:
            args, kwargs = bound.with_tensors(tuple(tensors))
            return session.call(replace(call, bound=replace(bound, args=args, kwargs=kwargs, tensors=tuple(tensors))))

        inputs = [cast(tensor, torch.float64) for tensor in bound.tensors]
        try:
            answers(inputs)
        except Exception:
            continue  # the model's code may raise anything in another dtype
        used = mode.coarsest if mode else torch.float64
        return answers, inputs, torch.finfo(used).eps
    return None


def _credible(
    dtype: Literal["float64", "float32"], computed: Mapping[str, torch.Tensor], answered: Answered, limit: float
) -> References | None:
    """Returns the references that eager agrees with in half of its digits, and the indices that belong to them."""
    computed = {name: tensor.detach().cpu() for name, tensor in computed.items()}
    eager = {name: tensor.detach().cpu() for name, tensor in answered.eager.items()}
    same = {name: _stored(tensor, eager[name]) for name, tensor in computed.items() if _same_form(tensor, eager[name])}
    found: dict[str, torch.Tensor] = {}
    accuracy: dict[str, Accuracy | None] = {}
    for output in answered.results:
        rows_of = output.tolerance.rows_of
        needed = {output.name, rows_of or output.name}
        if output.name not in answered.wanted or not needed <= same.keys():
            continue
        error = eager_error(output, eager, same)
        if error.rms <= limit and math.isfinite(error.greatest):
            found[output.name], accuracy[output.name] = same[output.name], error
            if rows_of is not None:
                found[rows_of], accuracy[rows_of] = same[rows_of], None
    for output in answered.results:
        if output.tolerance.ranking_of in found and output.name in same:
            found[output.name], accuracy[output.name] = same[output.name], None
    return References(dtype, found, accuracy) if found else None


def _same_form(computed: torch.Tensor, eager: torch.Tensor) -> bool:
    kinds = computed.dtype == eager.dtype or (computed.is_floating_point() and eager.is_floating_point())
    return kinds and computed.shape == eager.shape


def _stored(computed: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    """Returns a reference in the dtype that a case has it in. FORMAT.md says which."""
    if not eager.is_floating_point():
        return computed
    wide = torch.float64 if eager.dtype in (torch.float32, torch.float64) else torch.float32
    # Beyond the range of eager's dtype, such as the least number of the wide dtype in a mask, eager's is as good.
    greatest = torch.finfo(eager.dtype).max
    known = eager.double()
    beyond = (computed.double().abs() > greatest) & (known.abs() >= greatest) & (known.sign() == computed.sign())
    return torch.where(beyond, known, computed.double()).to(wide).contiguous()


class _WideSession:
    """Calls a model in a wide dtype."""

    def __init__(self, wide: torch.dtype, mode: Upcast | None, state: SessionState) -> None:
        self.wide = wide
        self._own = {b.name: own_copy(cast(b.at(state.sizes).detach(), wide), b.requires_grad) for b in state.buffers}
        self._mode = mode
        self._buffers = state.buffers
        self._weights: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The state by name, in that dtype."""
        return {name: tensor.detach() for name, tensor in self._own.items()}

    def call(self, call: AnsweredCall) -> list[torch.Tensor]:
        """Returns the results of a call in the wide dtype."""
        given = tuple(cast(tensor, self.wide).clone() for tensor in call.bound.tensors)
        args, kwargs = call.bound.with_tensors(given)
        replaced = self._replaced(call.model)
        mode = self._mode
        try:
            with gradients_of(call.model), _default_dtype(self.wide), mode or nullcontext():
                result = torch.func.functional_call(call.model, replaced, args, kwargs, strict=False, tie_weights=False)
        finally:
            if mode is not None and mode.met_control_flow:
                torch.compiler.reset()  # torch.cond was compiled in the mode, and would be refused from now on
        outputs = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        results = [*outputs, *(tensor for name, tensor in zip(call.bound.names, given) if name in call.written)]
        if not self._buffers:
            return results
        results = [tensor.clone() for tensor in results]  # some may be the state itself, which the next call changes
        for buffer in self._buffers:
            now = {name: cast(replaced[name], self.wide) for name in buffer.names}
            self._own[buffer.name] = settled(self._own[buffer.name], now)
        self._own = {buffer.name: own_copy(self._own[buffer.name], buffer.requires_grad) for buffer in self._buffers}
        return results

    def _replaced(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Returns the model's parameters and buffers in the wide dtype, and this session's state."""
        own = {name: self._own[buffer.name] for buffer in self._buffers for name in buffer.names}
        replaced: dict[str, torch.Tensor] = {}
        for named, wider in (
            (model.named_parameters(remove_duplicate=False), self._mode.parameter if self._mode else self._wider),
            (model.named_buffers(remove_duplicate=False), self._wider),
        ):
            for name, tensor in named:
                if name not in own and tensor not in self._weights:
                    # The model may ask for its gradient.
                    self._weights[tensor] = wider(tensor).requires_grad_(tensor.requires_grad)
                replaced[name] = own[name] if name in own else self._weights[tensor]
        return replaced

    def _wider(self, tensor: torch.Tensor) -> torch.Tensor:
        return cast(tensor.detach(), self.wide)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
