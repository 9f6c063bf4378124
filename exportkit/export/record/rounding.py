"""Rounds otherwise: the same model as other right code may compute it, which sums and fuses in another order."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from exportkit.errors import ExportError, UsageError
from exportkit.export.record.eager_run import EagerRun, run_eagerly
from exportkit.export.torch_patches.dispatch import UncompiledMode, mapped, written_leaves
from exportkit.export.torch_patches.patched import patched

_MOST = 1 << 20  # elements of a summand that is changed; weights may have more, and are the same in all code

_GOLDEN, _MANTISSA = -7046029254386353131, (1 << 53) - 1  # 2^64 divided by the golden ratio, as a signed number


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What these give depends on their inputs without rounding: they choose, move, compare or count.
_EXACT = _names(
    """
    abs neg positive relu clamp clamp_min clamp_max hardtanh threshold maximum minimum fmax fmin max min amax amin
    aminmax argmax argmin argsort sort topk kthvalue median nanmedian mode cummax cummin where masked_fill masked_select
    masked_scatter gather scatter index _unsafe_index index_select index_put _unsafe_index_put index_copy index_fill
    take put embedding cat stack constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d roll flip clone copy lift_fresh lift_fresh_copy fill zero zeros ones full empty
    empty_strided arange scalar_tensor eye new_zeros new_ones new_full new_empty new_empty_strided zeros_like ones_like
    full_like empty_like sign sgn floor ceil round trunc nan_to_num tril triu repeat max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool2d slice_scatter select_scatter diagonal_scatter as_strided_scatter im2col
    channel_shuffle pixel_shuffle pixel_unshuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d copysign
    view_as_real_copy complex real imag split_with_sizes_copy unbind_copy dropout native_dropout nonzero frexp set
    resize resize_as as_strided squeeze unsqueeze transpose t swapaxes swapdims detach
    """
)

# Sums, of which right code may add the terms in any order: each term is off by a rounding.
_SUMS = _names(
    """
    mm bmm addmm baddbmm addbmm addmv mv dot vdot addr convolution sum nansum mean var var_mean std std_mean norm
    linalg_vector_norm cumsum cumprod prod logsumexp logcumsumexp native_layer_norm native_group_norm native_batch_norm
    _native_batch_norm_legit_no_training avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    scatter_add scatter_reduce index_add segment_reduce _embedding_bag _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_attention_math _fused_rms_norm linear
    """
)

# Rounded to the nearest number by all code: equal inputs have equal results, whichever loop computes them.
_SINGLE = _names("add sub rsub mul div true_divide sqrt square reciprocal addcmul addcdiv lerp _to_copy")

# One formula, in which no two infinities meet that another form of it would keep apart.
_PLAIN = _names(
    """
    exp exp2 expm1 log log2 log10 log1p tanh sinh cosh asinh atanh erf erfc sigmoid sin cos atan pow rsqrt elu _softmax
    _log_softmax eq ne lt le gt ge isnan isinf isfinite isposinf isneginf signbit logical_and logical_or logical_not
    """
)


class Rounded(UncompiledMode):
    """Changes the result of every operator that rounds by up to two units in the last place.

    Attributes:
        undefined: Whether a number was made an integer that its dtype does not have, for which every machine and every
            loop has another answer.
        blends: Whether an operator combined an infinity, or a number near it, with others. Right code may do so in
            another form: of `a + (b - a) * w` and `a * (1 - w) + b * w` one is infinite and the other NaN.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int, device: torch.device, weights: Iterable[torch.Tensor] = ()) -> None:
        """Draws other roundings. Weights never change, whichever operator gives them back: they are the model's."""
        super().__init__()
        self.undefined = self.blends = False
        self.met_control_flow = False
        self._seed = seed
        self._generator = torch.Generator(device).manual_seed(seed)
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            self.met_control_flow |= isinstance(func, torch._ops.HigherOrderOperator)
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__.rstrip("_")
        if func.namespace in ("aten", "prims") and not (func.is_view or name in _EXACT | _SINGLE | _PLAIN):
            self.blends = self.blends or any(_has_great(leaf) for leaf in tree_leaves((args, kwargs)))
        if name in _SUMS and not func._schema.is_mutable:
            args = mapped(torch.Tensor, self._summand, args)
        result = func(*args, **kwargs)
        if name == "_to_copy":
            self._note_cast(args[0], result)
        if self._is_exact(func, name, args, result):
            return result
        single = name in _SINGLE
        if not func._schema.is_mutable:
            # Never in place: a result may be the memory of weights, which no schema says, such as cuDNN's flat ones.
            return mapped(torch.Tensor, lambda each: self._changed_result(each, by_value=single), result)
        for each in self._written(func, args, kwargs, result):
            if each.layout is torch.strided and each.untyped_storage().data_ptr() not in self._weights:
                each.copy_(self._changed_result(each, by_value=single))
        return result

    def _is_exact(self, func: torch._ops.OpOverload, name: str, args: tuple[Any, ...], result: Any) -> bool:
        if name == "_to_copy":  # code that fuses may leave out a cast to a narrower dtype
            before = args[0]
            widens = not _rounds(result) or not _rounds(before) or _eps(result) <= _eps(before)
            return bool(widens)
        return func.is_view or (func.namespace in ("aten", "prims") and name in _EXACT)

    def _written(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> list[torch.Tensor]:
        found = [leaf for leaf in tree_leaves(result) if _rounds(leaf)]
        return found or [leaf for leaf in written_leaves(func, args, kwargs) if _rounds(leaf)]

    def _changed_result(self, tensor: torch.Tensor, *, by_value: bool) -> torch.Tensor:
        if not _rounds(tensor) or not tensor.numel() or tensor.layout is not torch.strided:
            return tensor
        return self._changed(tensor, 2.0, by_value=by_value)

    def _summand(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _rounds(tensor) or tensor.numel() > _MOST or tensor.layout is not torch.strided:
            return tensor
        return self._changed(tensor, 1.0)

    def _changed(self, tensor: torch.Tensor, units: float, *, by_value: bool = False) -> torch.Tensor:
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        most = units * _eps(tensor)
        if by_value:
            mixed = (real.double().view(torch.int64) + self._seed) * _GOLDEN
            drawn = ((mixed ^ (mixed >> 29)) & _MANTISSA).double().mul_(2 * most / (_MANTISSA + 1)).add_(1 - most)
        else:
            drawn = torch.empty_like(real, dtype=torch.float64)
            drawn.uniform_(1 - most, 1 + most, generator=self._generator)
        changed = drawn.mul_(real).to(real.dtype)
        # What is finite stays so: an overflow is a matter of the values, which the reference sees.
        changed = torch.where(changed.isinf(), real, changed)
        return torch.view_as_complex(changed) if tensor.is_complex() else changed

    def _note_cast(self, before: torch.Tensor, after: torch.Tensor) -> None:
        if before.is_floating_point() and not (after.is_floating_point() or after.is_complex()) and before.numel():
            if after.dtype is torch.bool:
                return
            limits, values = torch.iinfo(after.dtype), before.double()
            inside = values.isfinite() & (values > limits.min - 1) & (values < limits.max + 1)
            self.undefined |= not bool(inside.all())


def _rounds(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_meta or value._is_zerotensor():
        return False  # the zeros of forward-mode gradients have no memory
    return (value.is_floating_point() or value.is_complex()) and torch.finfo(value.dtype).bits >= 16


def _has_great(value: Any) -> bool:
    if not (_rounds(value) and value.is_floating_point() and 0 < value.numel() <= _MOST):
        return False
    return bool((value.abs() > torch.finfo(value.dtype).max / 4).any())


def _eps(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def _attention_with_modes() -> AbstractContextManager[None]:
    """Lets flex_attention call its operator itself: torch compiles the call, and refuses to where there is a mode."""
    attention = sys.modules.get("torch.nn.attention.flex_attention")
    if attention is None:
        return nullcontext()
    return patched("flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", lambda _: True)


def perturbed_answers(
    eager_run: EagerRun, seed: int, *, great: bool = False
) -> Sequence[Mapping[str, torch.Tensor]] | None:
    """Answers the calls of a session once more, rounding otherwise: the results of each call, then the state, by name.

    `great`: the inputs have infinities or the like, which right code may blend with others. None if the model refuses
    what it computes then, or if right code may answer anything.
    """
    models = {call.model for call in eager_run.answered}
    weights = [
        tensor
        for model in models
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    ]
    mode = Rounded(seed, eager_run.calls[0].bound.tensors[0].device, weights)
    try:
        with torch.no_grad(), _attention_with_modes(), mode:
            again = run_eagerly(eager_run.model, eager_run.calls)
    except (ExportError, UsageError):
        return None
    finally:
        if mode.met_control_flow:
            torch.compiler.reset()  # torch.cond was compiled in the mode, and would be refused from now on
    anything = mode.undefined or (great and mode.blends)
    return None if anything else [each.eager for each in again.parts]
