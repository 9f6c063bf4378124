"""Writes csrc/runtime/exportkit.abi, what programs compiled with exportkit.h rely on: `python -m tools.c_abi`.

Functions with their types, structures with the place of each member on a 64-bit machine, constants with their values. A
test fails when the file is stale. Lines may be added, and a structure may grow; another change breaks programs that
exist.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elftools.dwarf.die import DIE
from elftools.elf.elffile import ELFFile

RUNTIME = Path(__file__).parents[1] / "csrc" / "runtime"
HEADER = RUNTIME / "include" / "exportkit" / "exportkit.h"
LISTING = RUNTIME / "exportkit.abi"

# The build of the C++ runtime leaves DLPack's header in the second one.
INCLUDE = [f"-I{RUNTIME / 'include'}", f"-I{RUNTIME.parents[1] / 'exportkit' / 'include'}"]
_FUNCTION = re.compile(r"\b(exportkit_\w+)\([^()]*(?:\([^()]*\)[^()]*)*\)\s*EXPORTKIT_NOEXCEPT;")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_MACRO = re.compile(r"^#define (EXPORTKIT_[A-Z_]+) (.+)$", re.MULTILINE)
_MARKERS = {"EXPORTKIT_API", "EXPORTKIT_NOEXCEPT"}
_OURS = ("exportkit_", "DL")
_ABOUT = "# What programs compiled with exportkit.h rely on. `python -m tools.c_abi` writes it.\n"


def functions() -> list[str]:
    """Returns the names of the functions that the header declares, sorted."""
    return sorted(_FUNCTION.findall(_COMMENT.sub("", HEADER.read_text())))


def listing() -> str:
    """Returns the content of the file. It needs a C compiler ($CC or cc), and raises CalledProcessError otherwise."""
    source = f"#include <{HEADER.relative_to(RUNTIME / 'include')}>\n"
    # A pointer of each function's type: debug information has no functions that nobody calls.
    source += "".join(f"__typeof__({name})* pointer_{name} = {name};\n" for name in functions())
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "types.o"
        flags = ["-std=gnu99", "-g", "-fno-eliminate-unused-debug-types", *INCLUDE, "-x", "c", "-"]
        _compile([*flags, "-c", "-o", str(compiled)], source)
        with compiled.open("rb") as file:
            (unit,) = ELFFile(file).get_dwarf_info().iter_CUs()
            blocks = [*_macros(source), *_declared(unit.get_top_DIE())]
    # A later version of DLPack adds names, on which no program relies that exists.
    listed = LISTING.read_text()
    blocks = [block for block in blocks if "exportkit" in block.lower() or block in listed]
    return _ABOUT + "\n".join(sorted(blocks)) + "\n"


def _compile(arguments: list[str], source: str) -> str:
    command = [os.environ.get("CC", "cc"), *arguments]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def _macros(source: str) -> Iterator[str]:
    """The values of the header's macros."""
    for name, value in _MACRO.findall(_compile(["-E", "-dM", *INCLUDE, "-x", "c", "-"], source)):
        if name not in _MARKERS:
            yield f"macro {name} = {value}"


def _declared(unit: DIE) -> Iterator[str]:
    for die in unit.iter_children():
        name = _name(die)
        if die.tag == "DW_TAG_enumeration_type":
            for constant in die.iter_children():
                yield f"constant {_name(constant)} = {constant.attributes['DW_AT_const_value'].value}"
        elif die.tag == "DW_TAG_variable" and name.startswith("pointer_"):
            function = _target(_target(die))
            yield f"function {name.removeprefix('pointer_')}{_signature(function)}"
        elif die.tag == "DW_TAG_structure_type" and name.startswith(_OURS) and _is_known(die):
            yield _structure(name, die)
        elif die.tag == "DW_TAG_typedef" and name.startswith(_OURS):
            aliased = _target(die)
            if aliased.tag == "DW_TAG_structure_type" and not _name(aliased):
                yield _structure(name, aliased)
            else:
                yield f"type {name} = {_type(aliased)}"


def _is_known(die: DIE) -> bool:
    """Whether a structure has members here."""
    return "DW_AT_declaration" not in die.attributes


def _structure(name: str, die: DIE) -> str:
    lines = [f"struct {name}: {die.attributes['DW_AT_byte_size'].value} bytes"]
    for member in die.iter_children():
        offset = member.attributes["DW_AT_data_member_location"].value
        lines.append(f"  {offset}: {_name(member)}: {_type(_target(member))}")
    return "\n".join(lines)


def _type(die: DIE | None) -> str:
    """A type in words from left to right, such as "pointer to const char"."""
    if die is None:
        return "void"
    if die.tag == "DW_TAG_pointer_type":
        return f"pointer to {_type(_target(die))}"
    if die.tag == "DW_TAG_const_type":
        return f"const {_type(_target(die))}"
    if die.tag == "DW_TAG_subroutine_type":
        return f"function{_signature(die)}"
    kind = {"DW_TAG_structure_type": "struct ", "DW_TAG_enumeration_type": "enum "}.get(str(die.tag), "")
    return kind + _name(die)


def _signature(function: DIE) -> str:
    parameters = [_type(_target(each)) for each in function.iter_children()]
    return f"({', '.join(parameters)}) -> {_type(_target(function))}"


def _target(die: DIE) -> Any:
    return die.get_DIE_from_attribute("DW_AT_type") if "DW_AT_type" in die.attributes else None


def _name(die: DIE) -> str:
    found = die.attributes.get("DW_AT_name")
    return found.value.decode() if found else ""


if __name__ == "__main__":
    LISTING.write_text(listing())
