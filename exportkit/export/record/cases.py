"""Draws the inputs of calls, of chosen sizes; and how the eager model is run and known again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from exportkit.errors import ExportError, UsageError
from exportkit.export.models.call_signature import BoundCall, describe_call
from exportkit.export.models.method_specs import matches
from exportkit.export.models.source_lines import users_code
from exportkit.export.record.host_copies import elements
from exportkit.export.torch_patches.control_flow import eager_control_flow
from exportkit.package.dtypes import DTYPES
from exportkit.package.manifest import Call
from exportkit.precision import with_tf32
from exportkit.sizes import input_bytes, label_of, plan_sizes, shape_at
from exportkit.spec import ExportSpec

# Limits the inputs of one recorded case, to keep packages small. `verify --against eager` tests the larger sizes.
MAX_CASE_BYTES = 4 << 20


def case_sizes(
    call: Call, example: Mapping[str, int], count: int, seed: int, *, max_bytes: int = MAX_CASE_BYTES
) -> list[dict[str, int]]:
    """Chooses the sizes of cases: the example's, the smallest, each dimension's largest that fits, then random ones.

    `max_bytes` limits the inputs of one case, but for the example and the smallest.
    """
    sizes = [dict(example)]
    smallest = input_bytes(call, {d.name: d.min for d in call.dimensions})
    if smallest <= MAX_CASE_BYTES:
        sizes += plan_sizes(call, count, seed=seed, max_bytes=max(smallest, max_bytes)).sizes
    unique = {tuple(sorted(item.items())): item for item in sizes}
    return list(unique.values())[:count]


def draw_inputs(
    spec: ExportSpec, call: Call, sizes: Mapping[str, int], seed: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Draws inputs of these sizes on the CPU: by the spec's `draw_inputs`, or from the values of its example inputs.

    Raises:
        UsageError: `draw_inputs` returned tensors that the call does not take.
        ExportError: `draw_inputs` raised.
    """
    generator = torch.Generator().manual_seed(seed)
    example = describe_call(spec.model, spec.example_inputs, spec.example_kwargs)
    if spec.draw_inputs is None:
        shapes = (shape_at(wanted, sizes) for wanted in call.inputs)
        tensors = [resampled(t.detach().cpu(), shape, generator) for t, shape in zip(example.tensors, shapes)]
        return example.with_tensors(as_described(tensors, call))
    with users_code(f"the spec's draw_inputs at {label_of(sizes)}"):
        answer = spec.draw_inputs(sizes, generator)
    if not (isinstance(answer, tuple) and [type(part) for part in answer] == [tuple, dict]):
        raise UsageError(
            f"the spec's draw_inputs returned a {type(answer).__name__}",
            hint="It must return (args, kwargs): a tuple and a dict.",
        )
    args, kwargs = answer
    drawn = describe_call(spec.model, args, kwargs)
    check_drawn(drawn, call, sizes, "the spec's draw_inputs")
    return drawn.with_tensors(as_described(drawn.tensors, call))


@contextmanager
def eager_mode(*, tf32: bool = False) -> Iterator[None]:
    """Computes without gradients, with full precision in products and convolutions, and with loops in Python."""
    with torch.no_grad(), with_tf32(tf32), eager_control_flow():
        yield


def state_sha256(model: torch.nn.Module, state: Iterable[str] = ()) -> str:
    """Hashes a model's parameters and buffers but for a spec's state: names, dtypes, shapes and bytes."""
    patterns = tuple(state)
    tensors = model.state_dict(keep_vars=True)
    tied = {id(t) for n, t in tensors.items() if matches(n, patterns)}
    tied |= {id(t) for n, t in model.named_buffers(remove_duplicate=False) if matches(n, patterns)}
    plain = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor) and id(t) not in tied}
    return digest_of_state(plain)


def digest_of_state(state: Mapping[str, torch.Tensor]) -> str:
    """Returns the `state_sha256` of a model with this state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(elements(tensor if tensor.is_contiguous() else tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


def check_packable(name: str, dtype: torch.dtype) -> None:
    """Checks that a case can hold a tensor of this dtype.

    Raises:
        ExportError: safetensors does not have the dtype.
    """
    plain = str(dtype).removeprefix("torch.")
    try:
        if plain in DTYPES:
            save({name: torch.empty(0, dtype=dtype)})
            return
    except (KeyError, SafetensorError):
        pass  # safetensors does not document which error it raises
    raise ExportError(
        f"`{name}` is {plain}, a dtype that safetensors, and so a package, does not have",
        hint="Convert it: complex numbers to complex64 or with torch.view_as_real, quantized ones with dequantize().",
    )


def as_described(tensors: Iterable[torch.Tensor], call: Call) -> tuple[torch.Tensor, ...]:
    """Returns the inputs of a call on the CPU, without gaps, in the dtypes of its description."""
    dtypes = (getattr(torch, wanted.dtype) for wanted in call.inputs)
    return tuple(tensor.detach().cpu().to(dtype).contiguous() for tensor, dtype in zip(tensors, dtypes))


def resampled(tensor: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Returns a tensor of a shape with values of the given one: token ids stay valid, pixels stay pixels."""
    if list(tensor.shape) == list(shape) or not tensor.numel():
        return tensor
    chosen = torch.randint(tensor.numel(), tuple(shape), generator=generator)
    return tensor.reshape(-1)[chosen.to(tensor.device)]


def check_drawn(drawn: BoundCall, call: Call, sizes: Mapping[str, int], what: str) -> None:
    """Raises UsageError if a drawn call is none that the traced call takes. `what` drew it, for the message."""
    found = {name: list(tensor.shape) for name, tensor in zip(drawn.names, drawn.tensors)}
    wanted = {tensor.name: shape_at(tensor, sizes) for tensor in call.inputs}
    if found != wanted:
        raise UsageError(
            f"{what} returned {found} for {label_of(sizes)}; the model was traced for {wanted}",
            hint="It must return the same tensors as the example inputs, of the sizes it is asked for.",
        )
    if drawn.parameters != call.parameters:
        raise UsageError(f"{what} returned another structure, or other constants, than the example inputs")
