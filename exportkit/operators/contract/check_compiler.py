"""The routes through torch.compile, torch.export and torch.autocast, and torch's own checks."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import FunctionSchema, Tensor, nn
from torch._inductor import config as inductor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from exportkit.export.compile.inductor_changes import opaque_operators_stay_whole, operators_as_called
from exportkit.export.torch_patches.opaque import opaque_operators
from exportkit.export.torch_patches.tensors_of_sizes import from_zero
from exportkit.operators.contract.check_fakes import fake_outputs
from exportkit.operators.contract.check_gradients import LEAVES, differentiable
from exportkit.operators.contract.check_values import tolerance
from exportkit.operators.contract.definition import ContractCheck, Problem
from exportkit.operators.contract.differences import first_difference, shortened
from exportkit.operators.contract.findings import Severity
from exportkit.operators.contract.operator_trial import NotApplicable, Trial, first_line
from exportkit.operators.contract.sample import Sample, tensors

_WRONG_ALREADY = (
    "determinism", "mutation", "aliasing", "fake-runs", "fake-shape", "fake-strides", "fake-dtype", "fake-device",
)  # fmt: skip


class OperatorCall(nn.Module):
    """An operator, or its wrapper, as a module of its tensor arguments. Everything else is constant."""

    def __init__(self, function: Callable[..., Any], bound: dict[str, Any], written: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.function, self.bound = function, bound
        self.names = [name for name, value in bound.items() if isinstance(value, Tensor)]
        self.written = tuple(name for name in written if name in self.names)  # an optional one may be missing

    @property
    def has_lists(self) -> bool:
        """Whether an argument is a list of tensors, which stays constant here."""
        return any(tensors(value) for name, value in self.bound.items() if name not in self.names)

    @classmethod
    def of(cls, trial: Trial, call: Sample) -> OperatorCall:
        """Returns the module of a call."""
        return cls(trial.subject.function, trial.bound(call), trial.subject.written)

    def inputs(self) -> tuple[Tensor, ...]:
        """Returns copies of the tensors."""
        return tuple(self.bound[n].detach().clone(memory_format=torch.preserve_format) for n in self.names)

    def forward(self, *values: Tensor) -> Any:
        """Returns what the operator returns, or else what it wrote to."""
        result = self.function(**(self.bound | dict(zip(self.names, values))))
        if result is not None:
            return result
        return tuple(values[self.names.index(name)].clone() for name in self.written)


def _first(trial: Trial) -> Sample:
    """Returns the call that is compiled and exported: the SPEC's first, else the first that has no size below 2."""
    calls = trial.subject.calls
    if trial.subject.spec is None:
        calls = tuple(c for c in calls if all(size > 1 for t in c.tensors for size in t.shape) and c.elements) or calls
    if not calls:
        raise NotApplicable("there are no calls")
    trial.answer(calls[0])
    return calls[0]


def _compared(trial: Trial, actual: Any, expected: Any, what: str, call: Sample) -> Problem | None:
    if found := first_difference(tensors(actual), tensors(expected), functools.partial(tolerance, trial)):
        return Problem(f"{what} must answer like the operator, but {found}.", call=call)
    return None


@ContractCheck(
    "compiles",
    "Look at the fake kernel: it must neither read values nor fix sizes.",
    order=81,
    unless=_WRONG_ALREADY,
    whole=True,
)
def compiles(trial: Trial) -> Problem | None:
    """torch.compile takes the operator into one graph, with sizes that vary."""
    call = _first(trial)
    module = OperatorCall.of(trial, call)
    try:
        actual = _compiled(module)
    except Exception as error:
        return _fails_for_its_overload(trial, call, module, error) or Problem(
            f"torch.compile(fullgraph=True) fails: {first_line(error)}.", call=call
        )
    return _compared(trial, actual, module(*module.inputs()), "The compiled operator", call)


@opaque_operators()
def _compiled(module: OperatorCall) -> Any:
    # Inductor's key does not know of a changed Inductor, nor of an operator whose kernel has changed
    torch._dynamo.reset()
    try:
        with inductor.patch(force_disable_caches=True), opaque_operators_stay_whole():
            return torch.compile(module, fullgraph=True, dynamic=True)(*module.inputs())
    finally:
        torch._dynamo.reset()


def _fails_for_its_overload(trial: Trial, call: Sample, module: OperatorCall, error: Exception) -> Problem | None:
    """Says that the operator is not to blame, where only torch's use of its overload with the tag `out` fails."""
    try:
        overload = tagged_overload(trial.subject.overload)
        with operators_as_called():
            _compiled(module)
    except Exception:  # it fails without the overload, too
        return None
    return Problem(
        f"torch.compile calls {overload} in the operator's place, and with sizes that vary this torch cannot: "
        f"{first_line(error)}. A package calls the operator.",
        "Leave the tag `out` away for users of torch.compile.",
        Severity.doubtful,
        call=call,
    )


@ContractCheck(
    "exports",
    "Compute sizes in the fake kernel from `x.shape` without int(), and declare sizes as SymInt in the schema.",
    order=82,
    unless=_WRONG_ALREADY,
    whole=True,
)
@opaque_operators()
def exports(trial: Trial) -> Problem | None:
    """One export with sizes that vary serves every call of the same ranks and constants."""
    call = _first(trial)
    module = OperatorCall.of(trial, call)
    if module.has_lists or not module.names:
        raise NotApplicable("the call has no tensor, or a list of tensors, which is not traced with sizes that vary")
    varying = _varying(trial, module)
    shapes = tuple(varying[name] for name in module.names)
    try:
        with from_zero():  # as exports of models do
            exported = torch.export.export(module, module.inputs(), dynamic_shapes=(shapes,)).run_decompositions({})
    except Exception as error:
        return Problem(f"torch.export with sizes that vary fails: {first_line(error)}.", call=call)
    targets = {node.target for node in exported.graph.nodes}
    if trial.subject.spec is not None and not trial.subject.is_mutable and trial.subject.overload not in targets:
        return Problem("The exported graph must have the operator as one node, but it was taken apart.", call=call)
    program, served = exported.module(), 0
    for other in [*trial.subject.calls, *(trial.others or [])]:
        again = OperatorCall.of(trial, other)
        if not _same_but_for_sizes(module, again, varying):
            continue
        try:
            actual = program(*again.inputs())
        except Exception as error:
            small = any(size < 2 for result in (*trial.answer(call), *trial.answer(other)) for size in result.shape)
            if "Guard failed" in str(error) and (_AT_ONE.search(str(error)) or small):
                continue
            return Problem(
                f"One export must serve all sizes, but for a call at others: {first_line(error)}.", call=other
            )
        if problem := _compared(trial, actual, again(*again.inputs()), "The exported operator", other):
            return problem
        served += 1
    if not served:
        raise NotApplicable("no call has sizes that all vary")
    return None


# torch.export takes 0, 1 and more for different sizes, also where they are computed from others.
_AT_ONE = re.compile(r"Guard failed: .*(==|!=|>=|<=|<|>) [012]$", re.MULTILINE)


def _varying(trial: Trial, module: OperatorCall) -> dict[str, dict[int, Any]]:
    """Returns the dimensions of each tensor that may vary: the SPEC's, or all that torch.export can let vary."""
    if trial.subject.spec is not None:
        dynamic = trial.subject.spec.dynamic
        if not dynamic:
            raise NotApplicable("the SPEC names no dimension that may vary")
        return {name: dict.fromkeys(dynamic.get(name, {}), torch.export.Dim.DYNAMIC) for name in module.names}
    return {
        name: {dim: torch.export.Dim.AUTO for dim, size in enumerate(module.bound[name].shape) if size > 1}
        for name in module.names
    }


def _same_but_for_sizes(first: OperatorCall, other: OperatorCall, varying: dict[str, dict[int, Any]]) -> bool:
    """Returns whether an export of the first call serves the other."""
    if first.names != other.names:
        return False
    constants = [{n: v for n, v in one.bound.items() if n not in one.names} for one in (first, other)]
    if constants[0] != constants[1]:
        return False
    for name in first.names:
        one, two = first.bound[name], other.bound[name]
        if one.dim() != two.dim() or one.dtype != two.dtype or one.device != two.device:
            return False
        if any(two.shape[d] < 2 if d in varying[name] else two.shape[d] != size for d, size in enumerate(one.shape)):
            return False
    return True


@ContractCheck(
    "autocast",
    "Register a rule with torch.library.register_autocast, which casts the inputs before kernel and fake see them. Do "
    "not ask for the autocast state in the kernel.",
    order=83,
    dtypes="first",
    most=2,
    unless=_WRONG_ALREADY,
)
@opaque_operators()
def autocast(trial: Trial, call: Sample) -> Problem | None:
    """Under torch.autocast, kernel, fake kernel and traced graph have results of the same dtype."""
    device = call.device.type
    shown = f'with torch.autocast("{device}", dtype=torch.bfloat16):\n    print({{call}})'
    with torch.autocast(device, dtype=torch.bfloat16):
        try:
            real = tensors(trial.run(call.copied(), trial.subject.overload))
        except Exception as error:
            text = f"A call that works outside of torch.autocast fails in it: {first_line(error)}."
            return Problem(text, shown=shown)
        fake = fake_outputs(trial, call)
    module = OperatorCall(trial.subject.overload, trial.bound(call), trial.subject.written)

    def region(*values: Tensor) -> list[Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16):
            return tensors(module(*values))

    traced = [] if module.has_lists else make_fx(region, tracing_mode="fake")(*module.inputs())(*module.inputs())
    for who, answers in (("the fake kernel says that output", fake), ("in a traced graph, output", traced)):
        for index, (other, r) in enumerate(zip(answers, real)):
            if other.dtype != r.dtype:
                text = f"Under torch.autocast, {who} {index} is {other.dtype}, but the kernel returns {r.dtype}."
                return Problem(text, shown=shown)
    return None


# --- torch's own checks of custom operators ---------------------------------------------------------------------------


def _opcheck(trial: Trial, call: Sample, test: str) -> Problem | None:
    if any(t.is_floating_point() and bool(t.isnan().any()) for t in trial.answer(call)):
        raise NotApplicable("opcheck takes NaN for a difference")
    try:
        torch.library.opcheck(trial.subject.overload, call.args, dict(call.kwargs), test_utils=test)
    except Exception as error:
        shown = f'torch.library.opcheck({{op}}.default, tuple(args), test_utils="{test}")'
        if any(t.requires_grad for t in call.tensors):
            shown = f"{LEAVES}\n{shown}"
        return Problem(f"torch.library.opcheck's {test} fails: {shortened(str(error))}.", shown=shown)
    return None


@ContractCheck(
    "opcheck-autograd",
    "Register the gradient: torch.library.register_autograd, or a kernel for Autograd (TORCH_LIBRARY_IMPL(ns, "
    "Autograd, m)). If there shall be none, call ATen below it: at::AutoDispatchBelowADInplaceOrView in the kernel.",
    order=69,
    dtypes="first",
    most=3,
    unless=("mutation", "aliasing"),
)
def opcheck_autograd(trial: Trial, call: Sample) -> Problem | None:
    """A gradient is registered. What a kernel records by calling ATen is lost in a compiled program."""
    if trial.subject.is_mutable:
        raise NotApplicable("the operator writes to an argument")
    own = call.copied().with_tensors(lambda t: t.requires_grad_() if t.is_floating_point() else t)
    return _opcheck(trial, own, "test_autograd_registration")


@ContractCheck(
    "opcheck-dynamic",
    "Look at the fake kernel, and at the backward: it must be made of operators with fake kernels.",
    order=80,
    dtypes="first",
    most=2,
    unless=(*_WRONG_ALREADY, "fake-layouts", "opcheck-autograd"),
)
@opaque_operators()
def opcheck_dynamic(trial: Trial, call: Sample) -> Problem | None:
    """The operator and its gradient are traced with symbolic sizes, and compiled by AOTAutograd."""
    own = call.copied()
    with contextlib.suppress(NotApplicable):
        for name in differentiable(trial, call).names:
            trial.bound(own)[name].requires_grad_()
    return _opcheck(trial, own, "test_aot_dispatch_dynamic")


# --- overloads that write into tensors of the caller: torch's compiler may call one in the operator's place -----------


@ContractCheck(
    "out-overload",
    "Let both call the same code. torch.compile may call the overload in the place of the operator.",
    order=31,
    dtypes="first",
    most=4,
    unless=("determinism", "mutation", "aliasing"),
)
def out_overload(trial: Trial, call: Sample) -> Problem | None:
    """The overload with the tag `out` writes what the operator returns."""
    overload = tagged_overload(trial.subject.overload)
    expected = trial.outputs(call)
    names = _written(overload._schema)
    if len(names) != len(expected):
        raise NotApplicable("it returns a list of tensors")
    room = {name: torch.ones_like(tensor) for name, tensor in zip(names, expected)}
    own = call.copied()
    shown = (
        "results = {call}\nresults = results if isinstance(results, tuple) else (results,)\n"
        f"room = dict(zip({names!r}, map(torch.ones_like, results)))\n"
        f"torch.ops.{overload}(*args, **room)\nprint(results, room)"
    )
    overload(*own.args, **own.kwargs, **room)
    if found := first_difference([*room.values()], expected, functools.partial(tolerance, trial)):
        said = f"{overload} must write what the operator returns, but {found}."
        return Problem(said, shown=shown)
    return None


def tagged_overload(operator: OpOverload) -> OpOverload:
    """Returns the overload with the tag `out` that torch takes for an operator's, or raises NotApplicable."""
    tag = getattr(torch.Tag, "out", None)  # torch 2.11 has none
    packet = operator.overloadpacket
    for name in packet.overloads():
        other: OpOverload = getattr(packet, name)
        if tag in other.tags and not operator._schema.is_mutable and _alike(other._schema, operator._schema):
            return other
    raise NotApplicable("no overload has the tag out")


def _written(schema: FunctionSchema) -> list[str]:
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _alike(out: FunctionSchema, functional: FunctionSchema) -> bool:
    """Whether one takes what the other takes, and a tensor for each that the other returns."""
    written = _written(out)
    given = [(a.name, str(a.type)) for a in out.arguments if a.name not in written]
    returned = all(isinstance(r.type, torch._C.TensorType) for r in functional.returns)
    return given == [(a.name, str(a.type)) for a in functional.arguments] and (
        returned and len(written) == len(functional.returns)
    )
