"""Gradients that a model asks torch for while it runs: when they are turned on, and how such a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from exportkit.export.torch_patches.patched import Function, all_patched, patched

T = TypeVar("T")

# Through these a model asks for gradients: torch.autograd.grad and its like, and torch.func.
_ENTRANCES = (
    "autograd._engine_run_backward",
    "forward_ad.enter_dual_level",
    "eager_transforms.grad_increment_nesting",
    "eager_transforms.jvp_increment_nesting",
)
_TURNED_OFF = (
    "does not require grad and does not have a grad_fn",
    "One of the differentiated Tensors does not require grad",
    "cannot register a hook on a tensor that doesn't require gradient",
)
_LOST = "fake tensor in the exported program constant's list"

_asking: WeakSet[torch.nn.Module] = WeakSet()
_differentiating: WeakSet[torch.nn.Module] = WeakSet()


@contextmanager
def gradients_of(model: torch.nn.Module) -> Iterator[None]:
    """Turns gradients off, or on for a model that was seen to ask for them without turning them on itself.

    Backward passes run in this thread, where the modes that watch a call find the lines of the model. What
    `.backward()` leaves in parameters does not stay there.
    """
    left = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with torch.set_grad_enabled(model in _asking), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        for parameter, gradient in left:
            if parameter.grad is not gradient:
                parameter.grad = gradient


def in_its_mode(model: torch.nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls the model, or a compiled form of it, in the mode that the model needs."""
    if model not in _asking:
        return function

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return function(*args, **kwargs)

    return called


def asks(model: torch.nn.Module, error: Exception) -> bool:
    """Tells whether an error says that a model asks for gradients where they are off. `gradients_of` knows it then."""
    if model in _asking or not any(text in str(error) for text in _TURNED_OFF):
        return False
    _asking.add(model)
    return True


def traced(model: torch.nn.Module, trace: Callable[[], T]) -> T:
    """Traces a model: once more below autograd if it asks for gradients.

    torch.export traces above autograd, so that it never sees what a backward pass computes. Below it, a backward pass
    is operators like all others.
    """
    if model not in _differentiating:
        with _refused_gradients() as refusals:
            try:
                result = trace()
            except Exception as error:
                if not refusals and _LOST not in str(error):
                    raise
            else:
                if not refusals:
                    return result
        _differentiating.add(model)
    with patched("_trace.make_fx", _below_autograd):
        try:
            return trace()
        except Exception as error:
            if not asks(model, error):
                raise
        return trace()


class _AsksForGradientsError(Exception):
    """The model asked for gradients while it was traced above autograd."""


@contextmanager
def _refused_gradients() -> Iterator[list[_AsksForGradientsError]]:
    """Refuses gradients, and yields the refusals: the model may catch them."""
    refusals: list[_AsksForGradientsError] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        refusals.append(_AsksForGradientsError())
        raise refusals[-1]

    with all_patched(*((entrance, refuse) for entrance in _ENTRANCES)):
        yield refusals


def _below_autograd(make_fx: Function, *args: Any, **named: Any) -> Any:
    # Of forward-mode differentiation. torch's own kernels of these two do not take sizes that vary.
    table = {
        torch.ops.aten._new_zeros_with_same_feature_meta.default: _zeros_like_other,
        torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default,
    }
    return make_fx(*args, **{**named, "pre_dispatch": False, "decomposition_table": table})


def _zeros_like_other(tensor: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0) -> torch.Tensor:
    return tensor.new_zeros((*tensor.shape[:self_num_batch_dims], *other.shape))
