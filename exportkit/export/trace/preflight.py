"""Checks that a model's custom operators can be packed, before anything is compiled."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import can_auto_functionalize
from torch._library.simple_registry import singleton as _registry
from torch._library.triton import triton_ops_to_kernels
from torch._library.utils import can_generate_trivial_fake_impl
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode, UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from exportkit.errors import OperatorNotExportableError, UsageError
from exportkit.export.models.missing_operators import fake_to_write
from exportkit.export.models.program_model import graphs_of
from exportkit.export.models.source_lines import raised_by_user, user_frame
from exportkit.export.torch_patches.dispatch import UNDEFINED, OperatorMode, watched_by
from exportkit.export.torch_patches.opaque import (
    composite_calls,
    opaque_operators,
    reads_memory,
    run_composite,
    uncertain_operators,
)
from exportkit.export.torch_patches.operator_bodies import body_of, python_key
from exportkit.export.torch_patches.quiet import quiet_torch
from exportkit.libraries import TORCH_NAMESPACES
from exportkit.package.manifest import Operator
from exportkit.progress import Progress, silent
from exportkit.schema_text import not_passed, schema_text

# What torch says of a model in half precision and inputs in float32, or the reverse.
OTHER_DTYPES = (
    r"(?:have|share) (?:the )?same (?:dtype|datatype|scalar type)|dtypes (?:must be the same|match)|expected dtype|"
    r"does not match weight dtype|Type promoting not supported|self\.dtype to be equal|"
    r"expected (?:m1 and m2|scalar type|mat1 and mat2)|should be the same|"
    r"(?:Input type|Expected).*(?:Half|Float|BFloat16|Double)"
)
SAME_DTYPE = (
    "Give the inputs in the dtype of the model's weights, or cast the weights and the floating inputs: --dtype float32."
)


IN_CPP = (
    "Or define it in C++ (TORCH_LIBRARY for the schema, TORCH_LIBRARY_IMPL for the kernel) and name that library with "
    "--op-library; only its fake kernel and its gradient may stay in Python."
)

# Results in a schema's text that a traced graph cannot hold.
_NUMBER = re.compile(r"\b(int|float|bool|Scalar|str|Device|ScalarType)\b(\[\])?")


def is_custom(operator: object) -> bool:
    """Tells whether something that a graph calls is an operator, and torch does not define it."""
    return isinstance(operator, OpOverload) and operator.namespace not in TORCH_NAMESPACES


def qualified_name(operator: OpOverload) -> str:
    """Returns the operator's name in the manifest: `namespace::name`, or `namespace::name.overload`."""
    return str(operator.name())


def describe_operators(operators: Mapping[str, OpOverload]) -> tuple[Operator, ...]:
    """Describes operators for the manifest, sorted by name."""
    return tuple(Operator(name=name, schema=schema_text(op._schema)) for name, op in sorted(operators.items()))


def graph_operators(module: torch.fx.GraphModule) -> dict[str, OpOverload]:
    """Finds the custom operators that a graph, or a graph within it, calls."""
    found = {}
    for part in graphs_of(module):
        for node in part.graph.nodes:
            if node.op == "call_function" and is_custom(node.target):
                found[qualified_name(node.target)] = node.target
    return found


def check_model(call: Callable[[], Any], device: torch.device, progress: Progress = silent) -> Any:
    """Runs a model once and checks each custom operator at its first call."""
    try:
        with checking_operators(device) as inspector:
            answer = call()
    except (OperatorNotExportableError, UsageError):
        raise
    except (Exception, SystemExit) as error:
        # The model may raise anything. Its own traceback is chained.
        runs = "The model must run in eager mode first, on these inputs. --debug shows the whole traceback."
        hint = f"{SAME_DTYPE} {runs}" if re.search(OTHER_DTYPES, str(error)) else runs
        raise raised_by_user("the model cannot run on its example inputs", error, hint=hint) from error
    if inspector.replaced:
        progress(f"replacing operators in Python by their bodies: {', '.join(sorted(inspector.replaced))}")
    return answer


@contextmanager
def checking_operators(device: torch.device) -> Iterator[_Inspector]:
    """Checks each custom operator, at its first call in the block, as `check_model` does."""
    with opaque_operators(), watched_by(_Inspector(device)) as inspector:
        yield inspector


def check_composites(model: torch.nn.Module, call: Callable[[torch.nn.Module], object], device: torch.device) -> None:
    """Runs a copy of a model once if it may call operators that torch takes for composites, and checks these.

    Nothing may be traced before: torch would give them tensors without memory, and reading it ends the process. The
    copy has the same parameters, and buffers of its own. What it raises is left to `check_model`.
    """
    seen: set[OpOverload] = set()

    def checked(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = run_composite(operator, args, kwargs)
        if operator not in seen and reads_memory(operator, args, kwargs):
            raise _without_fake(operator, _called_at())
        seen.add(operator)
        return answer

    with opaque_operators():
        if not uncertain_operators():
            return
        try:
            apart = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
            with composite_calls(device, checked):
                call(apart)
        except OperatorNotExportableError:
            raise
        except (Exception, SystemExit):  # the model may raise anything
            return


def check_operators(operators: Mapping[str, OpOverload], device: torch.device) -> None:
    """Checks the operators of a graph without calling them."""
    for operator in operators.values():
        _check_registered(operator, device, "")
        if "SymInt" in _results(operator):
            raise OperatorNotExportableError(
                f"operator {qualified_name(operator)} returns SymInt, and AOTInductor cannot compile that: "
                f"{operator._schema}",
                hint="Return a tensor without dimensions. Take sizes from a tensor's shape.",
            )


class _Inspector(OperatorMode):
    """Checks each operator at its first call.

    Attributes:
        replaced: The operators that Python implements, whose bodies tracing takes in their places.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._seen: set[OpOverload] = set()
        self.replaced: set[str] = set()

    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if body := body_of(func, args, kwargs):
            self.replaced.add(qualified_name(func))
            with self:
                return body(*args, **kwargs)
        if func in self._seen or not is_custom(func):
            return func(*args, **kwargs)
        self._seen.add(func)
        at = _called_at()
        _check_registered(func, self._device, at)
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            raise OperatorNotExportableError(
                f"operator {qualified_name(func)}{at} has no kernel for {self._device.type}",
                hint="Name a library that has one with --op-library, or export for another device.",
            ) from error
        check_fake(func, at, args, kwargs, result)
        return result


def _called_at() -> str:
    frame = user_frame(traceback.extract_stack())
    return f" (called at {frame.filename}:{frame.lineno})" if frame else ""


def _without_fake(operator: OpOverload, at: str) -> OperatorNotExportableError:
    return OperatorNotExportableError(
        f"operator {qualified_name(operator)}{at} has no fake kernel, so torch.export cannot know the shape it returns",
        hint=f"Register one: {fake_to_write(qualified_name(operator))} on a Python function that "
        "returns empty tensors of the right shape and dtype, or a Meta kernel with TORCH_LIBRARY_IMPL in C++.",
    )


def _check_registered(operator: OpOverload, device: torch.device, at: str) -> None:
    """Checks that an operator comes from a shared library, has a fake kernel, and returns what a graph can hold."""
    name = qualified_name(operator)
    if operator._schema.name in triton_ops_to_kernels:
        return  # A triton_op: the model contains the kernels that it calls, or ATen operators where Triton is missing.
    if python_key(operator, device.type):
        raise OperatorNotExportableError(
            f"operator {name}{at} is implemented in Python, and hosts do not have its source",
            hint=f"Export the model itself, whose operators are replaced by their bodies. {IN_CPP}",
        )
    _check_arguments(operator, at)
    _check_returns(operator, at)
    if not _has_fake(operator):
        raise _without_fake(operator, at)


def _check_arguments(operator: OpOverload, at: str) -> None:
    """Refuses arguments that AOTInductor cannot pass, and memory of which nobody knows whose it is."""
    name, schema = qualified_name(operator), schema_text(operator._schema)
    for argument in operator._schema.arguments:
        alias = argument.alias_info
        if refused := not_passed(argument):
            what, instead = refused
            raise OperatorNotExportableError(
                f"operator {name}{at}: argument {argument.name} is {what}, and AOTInductor cannot pass that: {schema}",
                hint=instead,
            )
        if alias and ("*" in alias.after_set or len(alias.before_set) > 1):
            raise OperatorNotExportableError(
                f"operator {name}{at} says of {argument.name} that its memory may be that of several, and torch.export "
                f"cannot trace that: {schema}",
                hint="Give the memory of each argument a letter of its own, as in Tensor(a!), or leave letters out.",
            )


def _check_returns(operator: OpOverload, at: str) -> None:
    """Refuses results that share memory with an argument, and numbers, which torch.export takes for constants."""
    name, schema = qualified_name(operator), operator._schema
    if any(result.alias_info for result in schema.returns) and not can_auto_functionalize(operator):
        without = str(schema).rpartition(" -> ")[0]
        raise OperatorNotExportableError(
            f"operator {name}{at} returns memory of an argument, and torch.export cannot trace that: {schema}",
            hint=f"Return nothing, `{without} -> ()`, and use the argument after the call."
            if schema.is_mutable
            else "Return a copy, and leave the aliases such as `(a)` out of the schema.",
        )
    if "Tensor?" in _results(operator):
        raise OperatorNotExportableError(
            f"operator {name}{at} may return None, and AOTInductor cannot compile that: {schema}",
            hint="Return a tensor without elements instead.",
        )
    if "[]" in _results(operator) and schema.is_mutable and len(schema.returns) > 1:
        raise OperatorNotExportableError(
            f"operator {name}{at} writes into arguments and returns a list beside other results, and torch.export "
            f"cannot trace that: {schema}",
            hint="Return tensors, or one list of all of them.",
        )
    if number := _NUMBER.search(_results(operator)):
        raise OperatorNotExportableError(
            f"operator {name}{at} returns {number[0]}, of which torch.export makes a constant: {schema}",
            hint="Return a tensor without dimensions. Take sizes from a tensor's shape.",
        )


def _results(operator: OpOverload) -> str:
    """Returns the types of the results. The schema's text tells SymInt from int; its objects do not."""
    return str(operator._schema).rpartition(" -> ")[2]


def _has_fake(operator: OpOverload) -> bool:
    if _registry.find(qualified_name(operator)).fake_impl.kernel is not None:
        return True
    if can_generate_trivial_fake_impl(operator):  # it writes into its arguments and returns nothing
        return True
    keys = ("Meta", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name(operator), key) for key in keys)


def check_fake(operator: OpOverload, at: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Compares a fake kernel's answer with the kernel's. torch does not do this (pytorch#181851)."""
    name = qualified_name(operator)
    env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(shape_env=env, static_shapes=True)
    fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    try:
        with mode, quiet_torch():
            fake = operator(*fake_args, **fake_kwargs)
    except (UnsupportedOperatorException, DynamicOutputShapeException) as error:
        raise OperatorNotExportableError(f"operator {name}{at} has no fake kernel that works: {error}") from error
    except Exception as error:
        # The fake kernel is the user's code and may raise anything.
        raise OperatorNotExportableError(
            f"the fake kernel of {name}{at} raised {type(error).__name__}: {error}",
            hint="It takes the operator's own arguments and returns empty tensors of the right shape and dtype.",
        ) from error
    if (problem := _problem(tree_leaves(result), tree_leaves(fake))) is not None:
        raise OperatorNotExportableError(
            f"the fake kernel of {name}{at} is wrong about {problem}",
            hint="Correct it: code compiled for a wrong shape or dtype reads outside of the tensor.",
        )


def _problem(results: Sequence[Any], fakes: Sequence[Any]) -> str | None:
    if len(results) != len(fakes):
        return f"how many tensors there are: it says {len(fakes)}, the kernel returned {len(results)}"
    for number, (real, fake) in enumerate(zip(results, fakes)):
        # Of what a kernel leaves undefined, a fake kernel makes a tensor: a list has nothing else.
        both = isinstance(real, torch.Tensor) and isinstance(fake, torch.Tensor) and real is not UNDEFINED
        if both and (problem := _difference(real, fake)) is not None:
            return f"output {number}: {problem}"
    return None


def _difference(real: torch.Tensor, fake: torch.Tensor) -> str | None:
    if real.dtype != fake.dtype:
        return f"it says {fake.dtype}, the kernel returned {real.dtype}"
    if real.device.type != fake.device.type:
        return f"it says {fake.device.type}, the kernel returned {real.device.type}"
    sizes = [size if isinstance(size, int) else None for size in fake.shape]  # None: the size depends on data
    if len(sizes) != real.ndim or any(s is not None and s != r for s, r in zip(sizes, real.shape)):
        return f"it says {list(fake.shape)}, the kernel returned {list(real.shape)}"
    if None not in sizes and real.numel() and _strides(real) != _strides(fake):
        return f"it says strides {list(fake.stride())}, the kernel returned {list(real.stride())}"
    return None


def _strides(tensor: torch.Tensor) -> list[int]:
    """Returns the strides that matter: the stride of a size of 1 does not."""
    return [int(stride) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1]
