"""The device and the dtype of a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from exportkit.errors import HostError, UsageError
from exportkit.export.models.call_signature import BoundCall, check_plain, describe_call
from exportkit.export.models.method_specs import method_specs
from exportkit.export.models.option_parsing import check_cast
from exportkit.package import core
from exportkit.spec import FORWARD, ExportSpec


@contextmanager
def prepared(spec: ExportSpec, device: torch.device, dtype: torch.dtype | None) -> Iterator[ExportSpec]:
    """Yields the spec with its model in eval mode, and model and example inputs on a device and in a dtype.

    The caller's model does not change: it is copied if it must move, or if its weights wrap other tensors.
    """
    placed = {name: _inputs(each, device, dtype) for name, each in method_specs(spec).items()}
    model = _placed(spec.model, device, dtype)
    training = [module for module in model.modules() if module.training]
    if spec.methods:
        spec = replace(spec, methods={name: replace(m, **placed[name]) for name, m in spec.methods.items()})
    else:
        spec = replace(spec, **placed[FORWARD])
    try:
        yield replace(spec, model=model.eval())
    finally:
        for module in training:
            module.training = True


def _inputs(spec: ExportSpec, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
    """Returns the example inputs of a method on the device and in the dtype, as fields of a spec."""
    bound = describe_call(spec.model, spec.example_inputs, spec.example_kwargs)
    for name, tensor in zip(bound.names, bound.tensors):
        check_plain(f"input {name}", tensor)
    args, kwargs = bound.with_tensors(tuple(_place(tensor, device, dtype) for tensor in bound.tensors))
    return {"example_inputs": args, "example_kwargs": kwargs}


def _placed(model: torch.nn.Module, device: torch.device, dtype: torch.dtype | None) -> torch.nn.Module:
    """Returns the model, or a copy that is on the device, in the dtype and of plain tensors."""
    state: dict[str, torch.Tensor] = {f"parameter {name}": tensor for name, tensor in model.named_parameters()}
    state |= {f"buffer {name}": tensor for name, tensor in model.named_buffers()}
    wrapped = any(map(is_traceable_wrapper_subclass, state.values()))
    for name, tensor in state.items():
        if not is_traceable_wrapper_subclass(tensor):
            check_plain(name, tensor)
    attributes = _plain_attributes(model, state.values())
    away = [tensor for tensor in (*state.values(), *attributes) if tensor.device != device]
    if away or any(dtype and t.is_floating_point() and t.dtype != dtype for t in state.values()):
        model = copy.deepcopy(model, _moved(state.values(), device, dtype) | _moved(attributes, device, None))
        _restore_parameters(model)
        model = model.to(device=device, dtype=dtype)  # modules may override what it calls
    elif wrapped:
        model = copy.deepcopy(model)
    if not wrapped:
        return model
    from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

    # Such as torchao's quantized weights: the tensors within become parameters of their own.
    return unwrap_tensor_subclass_parameters(model)


def _plain_attributes(model: torch.nn.Module, state: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that modules keep outside of their state, which Module.to leaves where they are.

    A number is left there, too: torch takes one of another device.
    """
    known = {id(tensor) for tensor in state}
    leaves = (leaf for module in model.modules() for leaf in tree_leaves(list(vars(module).values())))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return [tensor for tensor in tensors if tensor.dim() and id(tensor) not in known]


def _moved(tensors: Iterable[torch.Tensor], device: torch.device, dtype: torch.dtype | None) -> dict[int, torch.Tensor]:
    """Returns plain tensors where they must be, for deepcopy to take: it would copy them here first."""
    memo: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            moved = tensor.detach().to(device=device, dtype=cast)
            if moved.data_ptr() == tensor.data_ptr() and moved.device == tensor.device:
                continue
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
    return memo


def _restore_parameters(model: torch.nn.Module) -> None:
    """Makes parameters of what copies of TorchScript's modules have in their place: tensors with a past."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            for name, tensor in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(tensor.detach(), tensor.requires_grad))


def on_device(bound: BoundCall, device: torch.device) -> BoundCall:
    """Returns the same call with its tensors on a device."""
    tensors = tuple(tensor.to(device) for tensor in bound.tensors)
    args, kwargs = bound.with_tensors(tensors)
    return replace(bound, args=args, kwargs=kwargs, tensors=tensors)


def _place(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    # Compiled code expects the strides it was traced with, and callers must give contiguous inputs.
    return tensor.detach().to(device=device, dtype=cast).contiguous()


_EXPORT_ELSEWHERE = (
    "CUDA code is compiled on a machine that has the GPU: `exportkit export --format program` here, and "
    "`exportkit export PROGRAM.pt2 --device cuda` there."
)


class _ParsedDevice(msgspec.Struct):
    kind: str
    index: int | None


def usable_device(name: str, without_cuda: str = _EXPORT_ELSEWHERE) -> torch.device:
    """Returns the device with this name, which has the same meaning as for `exportkit.load`.

    Args:
        name: `cpu`, `cuda` or `cuda:<index>`.
        without_cuda: The hint if there is no CUDA.

    Raises:
        UsageError: The name is not one of these.
        HostError: This machine does not have the device.
    """
    device = msgspec.json.decode(core.text("ek_parse_device", core.encoded(name)), type=_ParsedDevice)
    if device.kind == "auto":
        raise UsageError("device 'auto' is not allowed here", hint="Give cpu, cuda or cuda:<index>.")
    if device.kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = (
            f"this torch ({torch.__version__}) has no CUDA" if torch.version.cuda is None else "there is no CUDA device"
        )
        raise HostError(f"cannot use {name}: {why}", hint=without_cuda)
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise HostError(f"there is no {name}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


def parse_floating(name: str | None) -> torch.dtype | None:
    """Returns the dtype to cast to; None for None."""
    if name is None:
        return None
    check_cast(name)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
