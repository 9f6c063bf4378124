"""Which operator schemas the stable ABI, torch.export and AOTInductor take, and what to write instead of the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import FunctionSchema

from exportkit.errors import UsageError
from exportkit.operators.contract.findings import Finding, Severity
from exportkit.schema_text import innermost, not_passed

# What the stable ABI of torch 2.11 passes to a kernel: alone, optional, or in a list. For any other type, a call raises
# "Not yet supported conversion from IValue to StableIValue".
_NAMES = {
    "TensorType": "Tensor",
    "IntType": "int",
    "SymIntType": "SymInt",
    "FloatType": "float",
    "BoolType": "bool",
    "StringType": "str",
    "DeviceObjType": "Device",
    "ScalarTypeType": "ScalarType",
    "LayoutType": "Layout",
    "MemoryFormatType": "MemoryFormat",
}
_OTHERS = {
    "NumberType": ("Scalar", "Write float; for an operator that computes with integers, an overload with SymInt."),
    "GeneratorType": ("Generator", "Take the random numbers as a tensor: a package draws others than eager does."),
}
_RETURN_TENSOR = "Return a tensor without dimensions. Take sizes from a tensor's shape."


def schema_findings(schema: FunctionSchema | str) -> tuple[Finding, ...]:
    """Finds what is wrong with a schema, or its text. The hint says what to write instead.

    Broken is what torch.export or AOTInductor refuses, and what every call on the stable ABI raises for. Doubtful is an
    `int`, which may be a size, and an optional Generator, which may only be left out.
    """
    parsed = parse_schema(schema) if isinstance(schema, str) else schema
    return (*filter(None, map(_of_argument, parsed.arguments)), *_of_results(parsed))


def parse_schema(text: str) -> FunctionSchema:
    """Reads a schema. UsageError has what torch says of a text that is none."""
    try:
        return torch._C.parse_schema(text)
    except RuntimeError as error:
        said = next(iter(str(error).strip().splitlines()), "torch cannot read it").partition("; for a full list")[0]
        raise UsageError(
            f"{text!r} is not a schema: {said}", hint='Write such as "scale(Tensor x, float by) -> Tensor".'
        ) from error


def schema_type(argument: Any) -> tuple[str, int, str]:
    """Returns a type's innermost kind, such as "SymIntType", in how many lists it is, and its text."""
    type_, around = innermost(argument)
    suffix = "".join("?" if each == "OptionalType" else "[]" for each in reversed(around))
    name = _NAMES.get(type_.kind()) or _OTHERS.get(type_.kind(), (str(type_),))[0]
    return type_.kind(), suffix.count("[]"), f"{name}{suffix}"


def _of_argument(argument: Any) -> Finding | None:
    kind, _, text = schema_type(argument)
    named = f"argument {argument.name} is {text}"
    if kind == "GeneratorType":
        if text == "Generator?":
            message = f"{named}, and AOTInductor compiles a call only without one"
            return _finding(message, _OTHERS[kind][1], Severity.doubtful)
        return _finding(f"{named}, and AOTInductor cannot compile a call with one", _OTHERS[kind][1])
    refused = not_passed(argument)
    if kind not in _NAMES:
        instead = refused[1] if refused else _OTHERS[kind][1]
        return _finding(f"{named}, and the stable ABI cannot pass that", instead)
    if refused:
        return _finding(f"{named}, and AOTInductor cannot compile a call with such a list", refused[1])
    if kind == "IntType":
        return _finding(
            f"{named}, and torch.export fixes it at the value of the example call",
            f"Write {text.replace('int', 'SymInt')} if it may be a size. Keep int for a mode or a level.",
            Severity.doubtful,
        )
    return None


def _of_results(schema: FunctionSchema) -> Iterator[Finding]:
    if _is_out_form(schema):
        message = f"it returns memory of an argument, and torch.export cannot trace a model that calls it: {schema}"
        yield _finding(message, "Let models call the form without `out`.", Severity.doubtful)
    elif any(result.alias_info for result in schema.returns):
        without = str(schema).rpartition(" -> ")[0]
        yield _finding(
            f"it returns memory of an argument, and torch.export cannot trace that: {schema}",
            f"Return nothing, `{without} -> ()`, and use the argument after the call."
            if schema.is_mutable
            else "Return a copy, and leave the aliases such as `(a)` out of the schema.",
        )
    for result in schema.returns:
        kind, lists, text = schema_type(result)
        if kind != "TensorType":
            yield _finding(f"it returns {text}, and torch.export takes only tensors from an operator", _RETURN_TENSOR)
        elif text not in ("Tensor", "Tensor[]"):
            hint = "Return a list without holes." if lists else "Return an empty tensor where there is no result."
            yield _finding(f"it returns {text}, and AOTInductor cannot compile that", hint)
        elif lists and schema.is_mutable and len(schema.returns) > 1:
            message = "it writes to an argument and returns a list beside others, and torch.export cannot trace that"
            yield _finding(message, "Return tensors, or one list of all of them.")


def _is_out_form(schema: FunctionSchema) -> bool:
    """Whether it is an overload that returns the arguments by keyword that it writes to, as torch's own do."""
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    returned = [result.alias_info is not None for result in schema.returns]
    by_keyword = bool(written) and all(a.kwarg_only for a in written)
    return bool(schema.overload_name) and by_keyword and all(returned) and len(returned) == len(written)


def _finding(message: str, hint: str, severity: Severity = Severity.broken) -> Finding:
    return Finding("schema", severity, message[0].upper() + message[1:] + ".", hint=hint)
