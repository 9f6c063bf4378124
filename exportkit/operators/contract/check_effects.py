"""What a call does beside its outputs: it writes to what the schema says, and its outputs are new."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import difference
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.memory_layouts import FRAMED, SPACED, MemoryLayout
from exportkit.operators.contract.operator_trial import NotApplicable, Trial
from exportkit.operators.contract.sample import Sample, tensors

_SHOWN = "import copy\nbefore = copy.deepcopy(args)\n{op}(*args)\nprint(before, args)"
_SHOWN_MEMORY = (
    "memory = [bytes(a.untyped_storage()) for a in args if isinstance(a, torch.Tensor)]\n{op}(*args)\n"
    "print(memory, [bytes(a.untyped_storage()) for a in args if isinstance(a, torch.Tensor)])"
)


def _memory(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _outside(tensor: Tensor) -> Tensor:
    """Returns which bytes of a tensor's memory belong to none of its elements."""
    mask = torch.ones_like(_memory(tensor))
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(mask.untyped_storage())
    item = tensor.element_size()
    shape, stride = (*tensor.shape, item), (*(st * item for st in tensor.stride()), 1)
    view.set_(mask.untyped_storage(), tensor.storage_offset() * item, shape, stride).zero_()
    return mask.bool()


@ContractCheck(
    "mutation",
    "Copy the argument before writing to it, or declare it in the schema as Tensor(a!).",
    order=20,
    dtypes="some",
    most=12,
)
def mutation(trial: Trial, call: Sample) -> Problem | None:
    """No byte of an argument changes, unless the schema says that it is written to. None outside its elements does."""
    for layout in (FRAMED, SPACED):
        if problem := _mutation(trial, call, layout):
            return problem
    return None


def _mutation(trial: Trial, call: Sample, layout: MemoryLayout) -> Problem | None:
    own = call.copied().with_tensors(layout.apply)
    named = [(name, t) for name, value in trial.bound(own).items() for t in tensors(value)]
    before = [_memory(t).clone() for _, t in named]
    try:
        trial.run(own, trial.subject.overload)
    except Exception:  # a stranger's operator refuses with any class
        if layout is FRAMED and trial.subject.spec is not None:
            raise
        return None  # it may refuse strides, and where memory begins
    declared = trial.subject.written
    for (name, tensor), old in zip(named, before):
        if _memory(tensor).shape != old.shape:
            if name in declared:
                continue
            return Problem(f"The schema does not say that {name} is written to, but the call resizes it.", shown=_SHOWN)
        changed = _memory(tensor) != old
        if not bool(changed.any()):
            continue
        outside = int((changed & _outside(tensor)).sum())
        if outside:
            return Problem(
                f"The call changes {outside} bytes beside the elements of {name}.",
                "Keep the writes inside of the argument: look at its strides, sizes and offset.",
                shown=_SHOWN_MEMORY,
                layout=layout,
            )
        if name not in declared:
            count = int(changed.reshape(-1).sum())
            text = f"The schema does not say that {name} is written to, but the call changes {count} of its bytes."
            return Problem(text, shown=_SHOWN)
    return None


@ContractCheck(
    "declared-mutation",
    "Take the `!` out of the schema, which makes the compiler keep copies, or write to the argument.",
    whole=True,
)
def declared_mutation(trial: Trial) -> Problem | None:
    """An argument that is declared as written to is written to by some call."""
    given = [trial.bound(call) for call in trial.subject.calls]
    names = {name for name in trial.subject.written if any(tensors(bound[name]) for bound in given)}
    if not names:
        raise NotApplicable("no call gives an argument that the schema declares as written to")
    tried = None
    for call in sorted(trial.subject.calls, key=lambda call: call.elements):
        if not names or not call.elements:
            continue
        own = call.copied()
        trial.run(own, trial.subject.overload)
        tried = tried or call
        old, new = trial.bound(call), trial.bound(own)
        for name in tuple(names):
            pairs = zip(tensors(old[name]), tensors(new[name]))
            if any(difference(a, b) for a, b in pairs):
                names.discard(name)
    if tried is None or not names:
        return None
    text = f"The schema says that {', '.join(sorted(names))} is written to, but no call changes it."
    return Problem(text, severity=Severity.doubtful, shown=_SHOWN, call=tried)


@ContractCheck(
    "aliasing",
    "Return a new tensor (`clone()`), or declare the alias in the schema as Tensor(a) on both sides.",
    order=20,
    dtypes="some",
)
def aliasing(trial: Trial, call: Sample) -> Problem | None:
    """An output shares no memory with an input or another output, of any call, unless the schema says so."""
    own = call.copied()
    returned = trial.run(own, trial.subject.overload)
    returned = returned if isinstance(returned, tuple) else (returned,)
    declared = [r.alias_info is not None for r in trial.subject.overload._schema.returns]
    outputs = [t for value, alias in zip(returned, declared) if not alias for t in tensors(value)]
    others = [(f"the argument {name}", t) for name, value in trial.bound(own).items() for t in tensors(value)]
    if not trial.subject.is_mutable:
        others += [("the output of an earlier call", t) for t in trial.outputs(call)]
    for index, output in enumerate(outputs):
        for what, other in others:
            if _share(output, other):
                return Problem(
                    f"The schema says that output {index} is new, but it shares memory with {what}.",
                    shown="print({op}(*args).data_ptr(), [a.data_ptr() for a in args if isinstance(a, torch.Tensor)])"
                    if len(tensors(returned)) == 1
                    else "{call}",
                )
        others.append((f"output {index}", output))
    return None


def _share(first: Tensor, second: Tensor) -> bool:
    one, two = first.untyped_storage(), second.untyped_storage()
    if one._cdata == two._cdata:
        return True
    start, other = one.data_ptr(), two.data_ptr()
    return first.device == second.device and start < other + two.nbytes() and other < start + one.nbytes()


@ContractCheck(
    "kept-inputs",
    "Keep no tensor of a call in a global variable or a static one.",
    order=20,
    dtypes="first",
)
def kept_inputs(trial: Trial, call: Sample) -> Problem | None:
    """After the call, nothing holds its inputs any more."""
    memory = _called(trial, call)
    try:
        if not all(torch.UntypedStorage._expired(reference) for _, reference in memory):
            gc.collect()
        held = sorted({name for name, reference in memory if not torch.UntypedStorage._expired(reference)})
    finally:
        for _, reference in memory:
            torch.UntypedStorage._free_weak_ref(reference)
    if not held:
        return None
    return Problem(f"After the call, the operator still holds {', '.join(held)}.", severity=Severity.doubtful)


def _called(trial: Trial, call: Sample) -> list[tuple[str, Any]]:
    """Makes the call on copies that nobody else holds, and returns a weak reference to each argument's memory."""
    own = call.copied()
    named = [(name, t) for name, value in trial.bound(own).items() for t in tensors(value) if t.numel()]
    trial.run(own, trial.subject.overload)
    return [(name, t.untyped_storage()._weak_ref()) for name, t in named]
