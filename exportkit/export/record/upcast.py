"""A mode in which a model computes in a wider dtype than its own."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from exportkit.export.torch_patches.dispatch import UncompiledMode, mapped

# A cast to one of these is a choice of precision, and is upcast. A cast to float8 or to an integer changes what the
# model computes, and stays.
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

LARGE_BYTES = 1 << 30  # of all parameters in the wide dtype, which may be four times the model
KEPT_BYTES = 1 << 26  # of a large model's upcast parameters, and of a block of one that is multiplied with

_aten = torch.ops.aten
_CHOOSING = (_aten.embedding.default, _aten.index_select.default)  # of the first argument, exact in any dtype
# The position of the second factor, its dimension that the result has too, and what else is cut along that.
_PRODUCTS: dict[Any, tuple[int, int, int | None]] = {
    _aten.mm.default: (1, 1, None),
    _aten.addmm.default: (2, 1, 0),
    _aten.bmm.default: (1, 0, 0),
}


class Upcast(UncompiledMode):
    """Computes each operator in a wider dtype, also where the model's code names a narrower one.

    Attributes:
        narrowest: The least precise dtype of the model: that of its tensors, or one that its code named.
        met_control_flow: Whether the model called torch.cond or its like.
        coarsest: The least precise dtype that an operator was computed in.
        decides: Whether the model chose by floating values: it compared, ranked or rounded them to whole numbers.
    """

    supports_higher_order_operators = True

    def __init__(self, wide: torch.dtype, narrow: torch.dtype, *, lazily: bool = False) -> None:
        """Upcasts to `wide` what a model computes in `narrow` or its like.

        Args:
            wide: The dtype.
            narrow: The least precise dtype of the model's tensors.
            lazily: Whether parameters are upcast where they are used, and at most KEPT_BYTES of them stay. A model
                that compares their dtype with that of inputs does not work then.
        """
        super().__init__()
        self.narrowest = narrow
        self.met_control_flow = self.decides = False
        self.coarsest = wide
        self._wide = wide
        self._tried = tuple(dict.fromkeys((wide, torch.float32, narrow)))
        self._parameters = _WideParameters(wide)
        self._lazily = lazily
        self._compared = _UpcastWhereCompared(self._parameters) if lazily else nullcontext()

    def __enter__(self) -> Any:
        self._compared.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._compared.__exit__(*raised)

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what takes a parameter's place in the model."""
        return self._parameters.placeholder(tensor) if self._lazily else cast(tensor.detach(), self._wide)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None  # an exported program checks the dtypes that it was traced with
        self.met_control_flow |= isinstance(func, torch._ops.HigherOrderOperator)
        given = mapped(torch.dtype, self._wider, (args, kwargs or {}))
        if self._lazily and args and self._parameters.has(args[0]):
            if func in _CHOOSING:
                return cast(func(*args, **(kwargs or {})), self._wide)
            if isinstance(func, torch._ops.OpOverload) and func.is_view and isinstance(args[0], torch.Tensor):
                return mapped(torch.Tensor, self._parameters.view, func(*args, **(kwargs or {})))
        refusal: Exception | None = None
        for dtype in self._tried:
            try:
                if (result := self._in_blocks(func, given, dtype)) is not None:
                    return result
                wide_args, wide_kwargs = wide = mapped(torch.Tensor, self._parameters.caster(dtype), given)
                with _without_cudnn() if self._lazily and func is _aten.convolution.default else nullcontext():
                    result = func(*wide_args, **wide_kwargs)
            except (RuntimeError, NotImplementedError) as error:
                refusal = refusal or error  # an operator without a kernel for this dtype
                continue
            self._write_back(func, given, wide)
            self._note(dtype)
            self.decides = self.decides or _decides(func, given, result)
            return mapped(torch.Tensor, lambda tensor: cast(tensor, self._wide), result)
        assert refusal is not None
        raise refusal

    def _in_blocks(self, func: Any, given: Any, dtype: torch.dtype) -> torch.Tensor | None:
        """Multiplies with a large parameter, of which a block is upcast at a time. None: it is not such a product."""
        args, kwargs = given
        if not self._lazily or func not in _PRODUCTS:
            return None
        position, dim, cut = _PRODUCTS[func]
        second = args[position]
        if not self._parameters.has(second) or second.numel() * dtype.itemsize <= KEPT_BYTES:
            return None
        caster, count = self._parameters.caster(dtype), -(-second.numel() * dtype.itemsize // KEPT_BYTES)
        others = list(mapped(torch.Tensor, lambda each: each if each is second else caster(each), args))
        results, start = [], 0
        for block in second.chunk(count, dim):
            others[position] = cast(block, dtype)
            own = list(others)
            if cut is not None and others[cut].dim() and others[cut].shape[dim - second.dim()] == second.shape[dim]:
                own[cut] = others[cut].narrow(dim - second.dim(), start, block.shape[dim])
            results.append(cast(func(*own, **kwargs), self._wide))
            start += block.shape[dim]
        self._note(dtype)
        return torch.cat(results, dim)

    def _note(self, dtype: torch.dtype) -> None:
        self.coarsest = max(self.coarsest, dtype, key=lambda each: torch.finfo(each).eps)

    def _write_back(self, func: Any, given: Any, wide: Any) -> None:
        """Copies what an operator wrote into a cast copy to the tensor that it was to write into."""
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for tensor, copy in zip(tree_leaves(given), tree_leaves(wide)):
                if isinstance(tensor, torch.Tensor) and copy is not tensor:
                    self._parameters.write(tensor, copy)

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in PRECISIONS:
            return dtype
        self.narrowest = max(self.narrowest, dtype, key=lambda each: torch.finfo(each).eps)
        return self._wide


_WHOLE = {"floor", "ceil", "round", "trunc", "sign", "floor_divide", "remainder", "fmod"}
_BESIDE = re.compile("pool|attention|norm|rnn|gru|lstm")  # what gives integers beside its values, for its gradient


def _decides(func: Any, given: Any, result: Any) -> bool:
    """Whether an operator makes whole numbers or truths of floating ones."""
    name = str(func).split(".")[1].rstrip("_") if isinstance(func, torch._ops.OpOverload) else ""
    makes = not _BESIDE.search(name) and any(_is(leaf, floating=False) for leaf in tree_leaves(result))
    return (makes or name in _WHOLE) and any(_is(leaf, floating=True) for leaf in tree_leaves(given))


def _is(value: Any, *, floating: bool) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() is floating


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Keeps a convolution from cuDNN, which took 7 GB to compute one of Whisper's in float64."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def is_large(parameters: Iterable[torch.Tensor], wide: torch.dtype) -> bool:
    """Returns whether a model's parameters would take more than LARGE_BYTES in a dtype."""
    return sum(tensor.numel() for tensor in parameters) * wide.itemsize > LARGE_BYTES


class _WideParameters:
    """Parameters in a wide dtype, made where they are used. The model's own do not change."""

    def __init__(self, wide: torch.dtype) -> None:
        self._wide = wide
        self._originals: set[torch.Tensor] = set()
        self._kept: OrderedDict[torch.Tensor, torch.Tensor] = OrderedDict()
        self._written: dict[torch.Tensor, torch.Tensor] = {}
        self._viewed = False

    def placeholder(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns what takes the parameter's place in the model: its values, of which `caster` knows."""
        detached = parameter.detach()
        self._originals.add(detached)
        return detached

    def has(self, tensor: Any) -> bool:
        """Returns whether something is a parameter, or a view of one, as the model has it."""
        return isinstance(tensor, torch.Tensor) and tensor in self._originals and tensor not in self._written

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes a view of a parameter for one."""
        self._viewed = True
        self._originals.add(tensor)
        return tensor

    def caster(self, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns what gives a tensor in a dtype, and a parameter with what was written to it."""
        return lambda tensor: self._cast(tensor, dtype) if tensor in self._originals else cast(tensor, dtype)

    def upcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a parameter in the wide dtype, and anything else as it is."""
        return self._cast(tensor, self._wide) if tensor in self._originals else tensor

    def _cast(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if parameter in self._written or dtype != self._wide:
            return cast(self._written.get(parameter, parameter), dtype)
        wide = self._kept.pop(parameter, None)
        self._kept[parameter] = wide = cast(parameter, dtype) if wide is None else wide
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return wide

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Writes into a tensor, or keeps what was written to a parameter."""
        if tensor in self._originals:
            if self._viewed:
                # Nobody knows which of the others share its memory. The reference is then computed without this mode.
                raise NotImplementedError("a parameter is written, and views of parameters were taken")
            self._written[tensor] = cast(values, self._wide)
        else:
            tensor.copy_(values)


class _UpcastWhereCompared(TorchFunctionMode):
    """Upcasts parameters for functions that compare their dtype with the input's before any operator is called.

    torch's convolutions do so. A dispatch mode is too late for them.
    """

    def __init__(self, parameters: _WideParameters) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            writes = getattr(func, "__name__", "").endswith("_")
            if writes or isinstance(error, NotImplementedError):
                raise  # what is written to a copy is lost, and the mode's own refusals hold
            if not any(map(self._parameters.has, tree_leaves((args, kwargs)))):
                raise
            wide_args, wide_kwargs = mapped(torch.Tensor, self._parameters.upcast, (args, kwargs))
            return func(*wide_args, **wide_kwargs)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of floating numbers in another dtype, and any other as it is."""
    return tensor.to(dtype) if tensor.dtype in PRECISIONS and tensor.dtype != dtype else tensor
