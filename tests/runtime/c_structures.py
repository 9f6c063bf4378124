"""exportkit.h and dlpack.h as ctypes has them, by the interface's listing. This imports neither torch nor exportkit.

test_c_interface_abi.py holds csrc/runtime/exportkit.abi to the headers.
"""

from __future__ import annotations

import ctypes as c
import re
from pathlib import Path
from typing import Any

LISTING = (Path(__file__).parents[2] / "csrc" / "runtime" / "exportkit.abi").read_text()
STRUCTURES: dict[str, type[c.Structure]] = {
    name: type(name, (c.Structure,), {}) for name in re.findall(r"^struct (\w+):", LISTING, re.MULTILINE)
}
_TYPES: dict[str, Any] = {
    "void": None,
    "int": c.c_int,
    "DLDeviceType": c.c_int32,
    "exportkit_model": c.c_uint64,
    "exportkit_session": c.c_uint64,
    **{
        f"{name}_t": getattr(c, f"c_{name}_t" if name == "size" else f"c_{name}")
        for name in ("size", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    **STRUCTURES,
}


def _type(text: str) -> Any:
    """The type that the listing describes from left to right, such as "pointer to const char"."""
    text = re.sub(r"^(const |struct )+", "", text)
    if not text.startswith("pointer to "):
        return _TYPES[text]
    target = re.sub(r"^(const |struct )+", "", text.removeprefix("pointer to "))
    if target.startswith("function"):
        arguments, result = _signature(target.removeprefix("function"))
        return c.CFUNCTYPE(result, *arguments)
    if target == "char":
        return c.c_char_p
    return c.c_void_p if target in ("void", "exportkit_error") else c.POINTER(_type(target))


def _signature(text: str) -> tuple[list[Any], Any]:
    arguments, result = re.fullmatch(r"\((.*)\) -> (.+)", text).groups()
    return [_type(argument) for argument in arguments.split(", ") if argument], _type(result)


def _complete(name: str, size: int, members: list[tuple[str, str, str]]) -> None:
    structure = STRUCTURES[name]
    structure._fields_ = [(member, _type(text)) for _, member, text in members]
    assert c.sizeof(structure) == size
    assert [getattr(structure, member).offset for _, member, _ in members] == [int(at) for at, _, _ in members]


_LISTED = {
    name: (int(size), re.findall(r"^  (\d+): (\w+): (.+)$", body, re.MULTILINE))
    for name, size, body in re.findall(r"^struct (\w+): (\d+) bytes\n((?:  .*\n)*)", LISTING, re.MULTILINE)
}
_FIRST = ("DLDevice", "DLDataType", "DLTensor", "DLPackVersion")  # which others contain
for _name in (*_FIRST, *(_LISTED.keys() - set(_FIRST))):
    _complete(_name, *_LISTED[_name])

FUNCTIONS = {
    name: _signature(text) for name, text in re.findall(r"^function exportkit_(\w+)(\(.*)$", LISTING, re.MULTILINE)
}
"""By name, without the prefix, the arguments and the result."""

Device, DataType, Tensor, Managed = (
    STRUCTURES[f"DL{n}"] for n in ("Device", "DataType", "Tensor", "ManagedTensorVersioned")
)
OpenOptions, RunOptions, Description, MethodInfo, TensorInfo, Size = (
    STRUCTURES[f"exportkit_{name}"]
    for name in ("open_options", "run_options", "description", "method_info", "tensor_info", "size")
)
Request, RequestInput, Piece, Answers = (
    STRUCTURES[f"exportkit_{name}"] for name in ("request", "request_input", "piece", "answers")
)
Place, Ended = (dict(Answers._fields_)[name] for name in ("place", "ended"))
