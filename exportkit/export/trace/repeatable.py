"""Checks that a model keeps nothing from one call to the next: compiled code has only its weights and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from exportkit.errors import ExportError, OperatorNotExportableError
from exportkit.export.models.call_signature import BoundCall
from exportkit.export.models.program_model import graphs_of
from exportkit.export.models.source_lines import called_at
from exportkit.export.torch_patches.dispatch import by_name, watched_by
from exportkit.export.torch_patches.needed_nodes import needed_for
from exportkit.export.trace.lifted import written_constants
from exportkit.export.trace.operator_trace import (
    DIFFERS,
    OperatorTrace,
    Writes,
    changed_number,
    fingerprint,
    first_difference,
)

ALLOW = "--allow-nondeterministic permits it; then only dtypes and shapes of the outputs are verified."
"""What the hint of an error about values says last."""

WRITE_FIRST = (
    "Write every element before it is read, or allocate with torch.zeros or torch.full in place of torch.empty."
)
"""The hint where memory is read that nobody wrote."""

DECLARE_STATE = (
    "Declare what outlives a call: --state NAME, or ExportSpec(state=...). "
    "Or pass the state in as an input and return it as an output."
)
_OR_KEEP = ", or keep it in a buffer and declare that: --state NAME."
DECLARE_WRITES = (
    "Declare what is written: --writes NAME, or ExportSpec(writes=...). Or clone it first, or return the new value."
)


def check_repeatable(
    model: torch.nn.Module,
    bound: BoundCall,
    call: Callable[[], Any],
    first: Any,
    names: Sequence[str],
    *,
    state: Collection[str] = (),
    allow_nondeterministic: bool,
) -> None:
    """Calls a model a second time, and looks at what it answers and at what it changes.

    What it filled in its first call, it may keep. Even if its answers may differ, it may write into nothing.
    """
    inputs = {f"input {name}": tensor for name, tensor in zip(bound.names, bound.tensors)}
    declared = {f"buffer {name}" for name in state}
    watched = {name: t for name, t in {**_state(model), **inputs}.items() if name not in declared}
    before = {name: fingerprint(tensor) for name, tensor in watched.items()}
    answers, trails = [first], []
    for _ in range(2):
        with watched_by(OperatorTrace()) as trail:
            answers.append(call())
        trails.append(trail)
    if undeclared := dict.fromkeys(trails[0].undeclared):
        raise OperatorNotExportableError(
            f"{', '.join(undeclared)} writes into an argument, and its schema does not say so: compilers believe it",
            hint="Mark the argument in the schema, such as Tensor(a!), or write into a copy of it.",
        )
    now = {**watched, **_state(model)}
    if written := [name for name in before if fingerprint(now[name]) != before[name]]:
        raise _writes(written, {name: watched[name] for name in written}, call)
    if allow_nondeterministic:
        return
    number = changed_number(*trails)
    tensors = ([leaf for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)] for answer in answers)
    listed = zip(names, *tensors)
    differing = [name for name, one, *others in listed if not all(agree(one, other) for other in others)]
    if differing or number:
        # What a call writes may be what the call before wrote, as the tail of the same input.
        if not number and (kept_up := _written_again(watched, now, call)):
            raise _writes(kept_up, {name: watched[name] for name in kept_up}, call)
        reason, advice = number or first_difference(*trails), "Take what changes as an input"
        if reason is None and trails[0].unwritten:
            reason, advice = f"unwritten memory of {', '.join(trails[0].unwritten)} is read", WRITE_FIRST.rstrip(".")
        reason = reason or "what the first call left behind is read"
        raise ExportError(
            "the model does not repeat itself when it is called again with the same inputs"
            + (f": output {', '.join(differing[:5])}{' ...' * (len(differing) > 5)} differs" if differing else "")
            + f"\n    {reason}",
            hint=f"{advice}{_OR_KEEP if reason.endswith(DIFFERS) else '.'} {ALLOW}",
        )


def check_constants(program: torch.export.ExportedProgram, call: Callable[[], Any]) -> None:
    """Checks that a model writes into no tensors that are neither its own nor its inputs, as a closure has them."""
    constants = {name: tensor for name, tensor in program.constants.items() if isinstance(tensor, torch.Tensor)}
    lines = written_constants(program)
    if constants and not lines:
        before = {name: fingerprint(tensor) for name, tensor in constants.items()}
        call()
        if any(fingerprint(constants[name]) != was for name, was in before.items()):
            with watched_by(Writes(constants)) as writes:
                call()
            lines = [line.partition(": ")[2] for line in writes.lines]
    if lines:
        raise ExportError(
            "the model writes into a tensor that is no input, no parameter and no buffer: results would depend on "
            "earlier calls" + "".join(f"\n    {line}" for line in dict.fromkeys(lines)),
            hint=f"Make a buffer of it, self.register_buffer(...). {DECLARE_STATE} Or write into a clone() of it.",
        )


def check_random(program: torch.export.ExportedProgram) -> None:
    """Checks that no output of a program depends on a random number."""
    drawing = dict.fromkeys(called_at(node) for node in _needed(program.graph_module) if _draws(node))
    if drawing:
        raise ExportError(
            "the model draws random numbers, and a package would not draw the ones that eager draws:"
            + "".join(f"\n    {line}" for line in drawing),
            hint=f"Take the numbers as an input, or turn them off: F.dropout draws unless training=False. {ALLOW}",
        )


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two answers of the same model to the same inputs are as near as rounding leaves them.

    The greatest difference of floating numbers may be the square root of the dtype's epsilon, relative to the greatest
    number. One element in a hundred of the others may differ: indices do, where scores are nearly equal.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.numel():
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return float((one != other).double().mean()) <= 0.01
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.detach().to(wide), other.detach().to(wide)
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()) or not torch.equal(a.isnan(), b.isnan()):
        return False
    if not finite.any():
        return True
    greatest = torch.maximum(a[finite].abs().max(), b[finite].abs().max())
    return bool((a[finite] - b[finite]).abs().max() <= torch.finfo(one.dtype).eps ** 0.5 * greatest)


def _written_again(
    watched: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor], call: Callable[[], Any]
) -> list[str]:
    """Returns the tensors that each call writes or replaces, whatever it puts there."""
    versions = {name: tensor._version for name, tensor in watched.items() if not tensor.is_inference()}
    call()
    written = {name for name, version in versions.items() if watched[name]._version != version}
    return [name for name, tensor in watched.items() if name in written or now[name] is not tensor]


def _writes(names: Sequence[str], tensors: Mapping[str, torch.Tensor], call: Callable[[], Any]) -> ExportError:
    """Returns the error for tensors that a call changes. Calls the model again to find the lines."""
    with watched_by(Writes(tensors)) as writes:
        call()
    lines = "".join(f"\n    {line}" for line in dict.fromkeys(writes.lines))
    by_kind: dict[str, list[str]] = {}
    for kind, name in (name.split(" ", 1) for name in names):
        by_kind.setdefault(kind, []).append(name)
    if inputs := by_kind.get("input"):
        return ExportError(
            f"the model writes into its inputs {', '.join(inputs)}{lines}",
            hint=DECLARE_WRITES,
        )
    what = " and ".join(f"{kind}s {', '.join(found)}" for kind, found in by_kind.items())
    advice = DECLARE_STATE if set(by_kind) == {"buffer"} else "Parameters cannot be state: make buffers of them."
    if "batch_norm" in lines or "instance_norm" in lines:
        advice = (
            "With training=True that function writes the running statistics: use training=False, or clones of them."
        )
    return ExportError(
        f"the model changes its {what} while it runs: results would depend on earlier calls and on which runner served "
        f"them{lines}",
        hint=advice,
    )


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers as the messages name them."""
    parameters = {f"parameter {name}": tensor for name, tensor in model.named_parameters()}
    buffers = {f"buffer {name}": tensor for name, tensor in model.named_buffers()}
    return parameters | buffers


def _draws(node: torch.fx.Node) -> bool:
    """Tells whether a node draws random numbers. Dropout does not in eval mode, nor attention without dropout."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    arguments |= by_name(target, node.args, node.kwargs)
    switches = [arguments[name] for name in ("train", "training", "dropout", "dropout_p") if name in arguments]
    return all(switches)


def _needed(module: torch.fx.GraphModule) -> Iterable[torch.fx.Node]:
    """Yields the nodes of a graph that an output depends on, and every node of the graphs within it."""
    yield from (node for part in graphs_of(module) if part is not module for node in part.graph.nodes)
    needed = needed_for(node for node in module.graph.nodes if node.op == "output")
    yield from (node for node in module.graph.nodes if node in needed)
