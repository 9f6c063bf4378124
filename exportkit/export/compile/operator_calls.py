"""How compiled code calls the operators of libraries.

It has a list of calls in JSON, from which torch's proxy executor takes the arguments that are fixed. To some it gives
others: None for a list without elements, and its own device for every device. Infinity it cannot read. A call with one
of these is written as C++ that goes to the dispatcher through the stable ABI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import sympy
import torch
from torch._inductor.virtualized import V
from torch.torch_version import TorchVersion

from exportkit.export.torch_patches.dispatch import by_name
from exportkit.export.torch_patches.patched import Function, all_patched
from exportkit.export.trace.operator_arguments import is_default_list, needs_dispatcher
from exportkit.schema_text import innermost

_CALL = "aoti_torch_proxy_executor_call_function("
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)


def operator_calls() -> AbstractContextManager[None]:
    """Changes the calls while the block runs.

    - Numbers that a call leaves to their defaults are in the list, as the code passes them: otherwise a run ends with
      "Mismatch between ints consumed and num_ints".
    - A bool for a Scalar is in the list alone, as the code is not asked for it.
    - A dtype, layout or memory format is a number in a schema, and torch takes it for one.
    - Before torch 2.13, the code went on where an operator failed. One that only writes into its arguments then failed
      unnoticed: the call succeeded, and nothing was written.
    """
    return all_patched(
        ("GraphModuleSerializer.serialize_inputs", _listed),
        ("CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_aot", _written),
    )


def _listed(serialize: Function, serializer: Any, target: Any, args: Any, kwargs: Any = None) -> Any:
    if not isinstance(target, torch._ops.OpOverload):
        return serialize(serializer, target, args, kwargs)
    arguments = target._schema.arguments
    given = by_name(target, args, kwargs or {})
    for each in arguments:
        if each.name not in given and each.kwarg_only and _has_integers(each.default_value):
            given[each.name] = each.default_value
        elif each.name in given and is_default_list(each, given[each.name]):
            del given[each.name]  # the executor takes a default from the schema
    if any(_is_dispatched(each, given.get(each.name)) for each in arguments):
        return []
    typed = {each.name: _typed(each, given[each.name]) for each in arguments if each.name in given}
    return serialize(serializer, target, (), typed)


def _written(call: Function, wrapper: Any, target: Any, args: Sequence[Any], names: Any, outputs: Any) -> None:
    if isinstance(target, torch._ops.OpOverload):
        arguments = target._schema.arguments
        if any(map(_is_dispatched, arguments, args)):
            V.extern_kernel_nodes.pop()  # its entry in the list
            _write_call(wrapper, target, args, names, outputs)
            return
        args = [_passed(wrapper, each, value) for each, value in zip(arguments, args)]
    write = wrapper.writeline
    wrapper.writeline = lambda line: write(
        f"AOTI_TORCH_ERROR_CODE_CHECK({line.rstrip(';')});" if line.startswith(_CALL) else line
    )
    call(wrapper, target, args, names, outputs)
    del wrapper.writeline


class _Written(int):
    """An integer that code has as an expression."""

    text = ""

    def __str__(self) -> str:
        return self.text


def _passed(wrapper: Any, argument: Any, value: Any) -> Any:
    """Returns what the code passes to the executor: of a Scalar that is a size its expression, of a bool nothing."""
    if innermost(argument)[0].kind() != "NumberType" or not isinstance(value, (bool, torch.SymInt, sympy.Expr)):
        return value
    if isinstance(value, bool):
        return None
    if TorchVersion(torch.__version__) >= "2.15":  # which passes a torch.SymInt, and of other integers only int itself
        shapes = V.graph.sizevars.shape_env
        return value if isinstance(value, torch.SymInt) else shapes.create_symintnode(value, hint=None)
    size = _Written()
    size.text = wrapper.val_to_arg_str_for_prim_type(value, None)
    return size


def _has_integers(default: object) -> bool:
    numbers = default if isinstance(default, list) else [default]
    return bool(numbers) and all(type(number) is int for number in numbers)


def _is_dispatched(argument: Any, value: object) -> bool:
    return needs_dispatcher(argument, value, V.graph.device_type)


def _typed(argument: Any, value: Any) -> Any:
    name = innermost(argument)[0].kind()
    if name == "NumberType" and isinstance(value, torch.SymInt):
        return 0  # the code passes it
    if type(value) is not int:
        return value
    if name == "ScalarTypeType":
        return torch.ops.aten.zeros.default([0], dtype=value).dtype
    if name == "LayoutType":
        return torch.ops.aten.zeros.default([0], layout=value).layout
    return _FORMATS[value] if name == "MemoryFormatType" else value


def _write_call(wrapper: Any, target: torch._ops.OpOverload, args: Sequence[Any], names: Any, outputs: Any) -> None:
    """Writes a call of the dispatcher."""
    schema = target._schema
    for header in ("library", "device"):
        wrapper.include_extra_header(f"torch/csrc/stable/{header}.h")
    wrapper.generate_extern_kernel_args_decl_if_needed(target, [None] * len(args), names, outputs)  # the results
    given = [
        f"torch::stable::detail::from({_expression(wrapper, target, each, each.real_type, _typed(each, value))})"
        for each, value in zip(schema.arguments, args)
    ]
    size = max(len(given), len(schema.returns))
    wrapper.writeline("{")
    wrapper.writeline(
        "auto shared = [](AtenTensorHandle tensor) { AtenTensorHandle other; "
        "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &other)); return other; };"
    )
    wrapper.writeline(f"std::array<StableIValue, {size}> stack{{{', '.join(given)}}};")
    wrapper.writeline(
        f'AOTI_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("{schema.name}", "{schema.overload_name}", stack.data(), '
        "TORCH_ABI_VERSION));"
    )
    for line in _results(schema, names):
        wrapper.writeline(line)
    wrapper.writeline("}")


def _results(schema: Any, names: Any) -> Iterator[str]:
    one_list = len(schema.returns) == 1 and schema.returns[0].real_type.kind() == "ListType"
    for index, each in enumerate([names] if one_list else names):
        if isinstance(each, str):
            yield f"{each} = torch::stable::detail::to<AtenTensorHandle>(stack[{index}]);"
            continue
        yield f"auto list{index} = torch::stable::detail::to<std::vector<AtenTensorHandle>>(stack[{index}]);"
        said = f"{schema.name} returned another number of tensors than its fake kernel says"
        yield f'if (list{index}.size() != {len(each)}) throw std::runtime_error("{said}");'
        yield from (f"{name} = list{index}[{place}];" for place, name in enumerate(each))


_TYPES = {
    "TensorType": "AtenTensorHandle",
    "IntType": "int64_t",
    "SymIntType": "int64_t",
    "FloatType": "double",
    "BoolType": "bool",
    "StringType": "std::string",
}


def _expression(wrapper: Any, target: torch._ops.OpOverload, argument: Any, kind: Any, value: Any) -> str:
    """Returns the C++ of an argument's value, which is of a part of its type."""
    name = kind.kind()
    if name == "OptionalType":
        if value is None:
            return "std::nullopt"
        return f"std::make_optional({_expression(wrapper, target, argument, kind.getElementType(), value)})"
    if name == "ListType":
        element = kind.getElementType()
        optional = element.kind() == "OptionalType"
        type_ = _TYPES.get((element.getElementType() if optional else element).kind())
        if type_ is not None:
            type_ = f"std::optional<{type_}>" if optional else type_
            each = ", ".join(_expression(wrapper, target, argument, element, part) for part in value)
            return f"torch::headeronly::HeaderOnlyArrayRef<{type_}>(std::initializer_list<{type_}>{{{each}}})"
    if name == "TensorType":
        return f"shared({value.codegen_reference()})"
    if name == "StringType":
        octal = "".join(f"\\{byte:03o}" for byte in value.encode())
        return f'std::string("{octal}", {len(value.encode())})'
    if name in _TYPES:
        return f"{_TYPES[name]}({wrapper.val_to_arg_str_for_prim_type(value, kind)})"
    if name == "DeviceObjType":
        return f'torch::stable::Device("{value}")'
    if name in ("ScalarTypeType", "LayoutType", "MemoryFormatType"):
        return str(wrapper.val_to_arg_str_for_prim_type(value, kind))
    raise AssertionError(f"{argument.name}: {kind}")  # check_arguments has refused it
