"""What is known of schemas without torch: their one text, and which arguments no compiled code can pass."""

from __future__ import annotations

import re
from typing import Any

_NOT_PASSED = {
    "ComplexType": ("complex", "Write two floats, the real and the imaginary part, or a tensor."),
    "DictType": ("Dict", "Write one argument for each key, or a list whose order is fixed."),
    "TupleType": ("a tuple", "Write one argument for each part, or a list."),
    "AnyType": ("Any", "Write the type."),
    "SymBoolType": ("SymBool", "Write bool, which export fixes, or take a tensor."),
    "ClassType": ("an object", "Take the object's tensors and numbers: a package cannot hold the object."),
}
_PASSED_IN_LISTS = ("TensorType", "IntType", "SymIntType", "FloatType", "BoolType", "StringType")
_PASSED_ALONE = ("NumberType", "DeviceObjType", "ScalarTypeType", "LayoutType", "MemoryFormatType", "GeneratorType")

_WRITTEN = re.compile(r"\(\$\d+! -> \)")


def schema_text(schema: object) -> str:
    """Returns the text of a torch.FunctionSchema; csrc/runtime/operators.cpp has the same.

    Torch cannot read back all that it prints, such as the default `Device d="cpu"`, so texts are compared and none is
    read. `Tensor!` is the one thing that it prints otherwise than a person writes it.
    """
    return _WRITTEN.sub("!", str(schema))


def innermost(argument: Any) -> tuple[Any, list[str]]:
    """Returns the type of an argument or a result, and the kinds of the lists and options around it."""
    type_, around = argument.real_type, []
    while type_.kind() in ("OptionalType", "ListType"):
        around.append(type_.kind())
        type_ = type_.getElementType()
    return type_, around


def not_passed(argument: Any) -> tuple[str, str] | None:
    """Returns what an argument is that no compiled code can pass, and what to write instead; None for any other."""
    type_, around = innermost(argument)
    kind, name = type_.kind(), str(type_).replace("number", "Scalar")
    if kind in _NOT_PASSED:
        return _NOT_PASSED[kind]
    if kind not in (*_PASSED_IN_LISTS, *_PASSED_ALONE):
        return name, "Leave the argument out, or take its numbers and tensors."
    if around.count("ListType") > 1:
        return "a list of lists", "Write a flat list, and the lengths as another."
    if "ListType" in around and kind in _PASSED_ALONE:
        return f"a list of {name}", "Write one argument for each; for Scalar, a list of float."
    if around[-2:] == ["ListType", "OptionalType"] and kind != "TensorType":
        return f"a list of optional {name}", "Write a list without None, and a list of bool that says where it is."
    return None
